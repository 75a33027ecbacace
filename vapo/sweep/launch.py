"""Starting runs: as processes of this host, or as jobs of a Slurm cluster through submitit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vapo.config.scalars import other_number
from vapo.errors import UserError
from vapo.sweep.stopping import Stoppable
from vapo.system.installation import install_command
from vapo.system.process import STARTER
from vapo.system.python_child import (
    python_command,
    python_environment,
    safe_path_in_children,
)
from vapo.tracking.provenance import output_of

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def fit_command(config: Path, checkpoint: Path | None) -> list[str]:
    """`vapo fit` in this Python."""
    command = python_command("vapo", "fit", "--config", str(config))
    return command if checkpoint is None else [*command, "--ckpt_path", str(checkpoint)]


@dataclass
class LocalHandle:
    process: subprocess.Popen[bytes]
    slot: int

    def poll(self) -> int | None:
        return self.process.poll()

    def interrupt(self) -> None:
        """Send what Ctrl-C sends, so that the run ends its MLflow run."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """The whole process group, by force."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class LocalLauncher:
    """`jobs` runs at a time on this host, each with its share of the cores and its own GPUs.

    A run stops at its next safe point when this process ends, however it ends.

    `keep_open`: a file descriptor that the runs inherit (the sweep's lock).
    """

    jobs: int
    gpus: Sequence[str] = ()
    keep_open: int | None = None
    num_threads: int | None = None
    _started: list[LocalHandle] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.num_threads = max(1, num_cores() // self.jobs)

    def start(self, name: str, command: Sequence[str], log: Path, *, devices: int) -> Stoppable:
        self._started = [handle for handle in self._started if handle.poll() is None]
        slot = min(set(range(self.jobs)) - {handle.slot for handle in self._started})
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(slot, devices),
                start_new_session=True,  # Ctrl-C is ours to pass on
                pass_fds=() if self.keep_open is None else (self.keep_open,),
            )
        self._started.append(LocalHandle(process, slot))
        return self._started[-1]

    def environment(self, slot: int, devices: int) -> dict[str, str]:
        """Threads by slot; GPUs round robin, `devices` for each run."""
        environment = python_environment() | {STARTER: str(os.getpid())}
        environment.update(dict.fromkeys(_THREAD_VARIABLES, str(self.num_threads)))
        if self.gpus:
            chosen = [self.gpus[(slot * devices + k) % len(self.gpus)] for k in range(devices)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(chosen))
        return environment


class SlurmHandle:
    def __init__(self, job: Any, log: Path) -> None:
        self.job = job
        self.log = log
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self.job.done():
            try:
                self.returncode = int(self.job.result())
            except Exception as error:  # lost, timed out, cancelled: submitit's own kinds
                with self.log.open("a") as log:
                    log.write(f"\nthe job {self.job.job_id} did not end by itself: {error}\n")
                self.returncode = 1
        return self.returncode

    def interrupt(self) -> None:
        self.job.cancel()

    def kill(self) -> None:
        """The cluster ends a job that was cancelled, by force after a time of its own."""


class SlurmLauncher:
    """Each run is one job. Cores and GPUs are the job's own, so nothing is assigned here.

    `parameters` go to submitit (`timeout_min=600`, `slurm_partition=gpu`, `cpus_per_task=8`);
    `cluster=local` runs the jobs as processes of this host, to try the launcher out.

    Raises: UserError: submitit is not installed, or refuses the parameters.
    """

    num_threads: int | None = None  # left to the run itself

    def __init__(self, folder: Path, parameters: Mapping[str, str]) -> None:
        try:
            import submitit
        except ImportError:
            raise UserError(
                f"--launcher slurm needs the package submitit: {install_command('slurm')}"
            ) from None
        options = {key: read_parameter(key, text) for key, text in parameters.items()}
        cluster = options.pop("cluster", "slurm")
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self.executor.update_parameters(**options)
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            raise UserError(f"--launcher slurm: submitit says: {error}") from None

    def start(self, name: str, command: Sequence[str], log: Path, *, devices: int) -> Stoppable:
        self.executor.update_parameters(name=name)
        with safe_path_in_children():  # the job is a Python process, too
            job = self.executor.submit(run_logged, list(command), str(log))
        return SlurmHandle(job, log)


def read_parameter(key: str, text: str) -> Any:
    """A parameter's value in YAML; a time as `1:30`, which is a number there, is its text.

    Raises: UserError: it is no YAML.
    """
    try:
        return text if other_number(text) else yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--slurm {key}={text}: not valid YAML: {reason}") from None


def run_logged(command: list[str], log: str) -> int:
    """Runs inside the job: the process, its output at the end of `log`; returns its exit code.

    The run stops where its job's process is killed alone.
    """
    environment = os.environ | {STARTER: str(os.getpid())}
    with open(log, "ab") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return done.returncode


Launcher = LocalLauncher | SlurmLauncher


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, without loading torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip() not in ("", "-1")]
    indices = output_of(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], timeout_s=10)
    return (indices or "").split()
