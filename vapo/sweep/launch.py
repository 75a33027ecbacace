"""Start runs, as processes of this host or as jobs of a Slurm cluster, through submitit."""

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
from vapo.tracking.provenance import output_of
from vapo.user_code.python_child import (
    python_command,
    python_environment,
    safe_path_in_children,
)

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def fit_command(config: Path, checkpoint: Path | None) -> list[str]:
    """Return the command line of `vapo fit` with this Python.

    With a `checkpoint`, the command resumes from it.
    """
    command = python_command("vapo", "fit", "--config", str(config))
    return command if checkpoint is None else [*command, "--ckpt_path", str(checkpoint)]


@dataclass
class LocalHandle:
    """A run that is a process of this host.

    Attributes:
        slot: the run's number among the runs at that time, which decides its GPUs.
    """

    process: subprocess.Popen[bytes]
    slot: int

    def poll(self) -> int | None:
        return self.process.poll()

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C, so that the run can still end its MLflow run."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End the run's process group by force, and wait until it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class LocalLauncher:
    """Starts up to `jobs` runs at a time on this host, each with a share of the cores and GPUs.

    A run stops at its next safe point when this process ends, however it ends.

    Attributes:
        gpus: the ids of the GPUs to share.
        keep_open: a file descriptor (the sweep's lock) that the runs inherit.
        num_threads: the threads of each run, computed from `jobs`.
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
        """Return the environment variables of a run: its number of threads, and its GPUs.

        The runs take `devices` GPUs each, round robin by their slot, so that several may share one.
        If there are no GPUs to share, the variable for them stays as it is.
        """
        environment = python_environment() | {STARTER: str(os.getpid())}
        environment.update(dict.fromkeys(_THREAD_VARIABLES, str(self.num_threads)))
        if self.gpus:
            run_gpus = [self.gpus[(slot * devices + k) % len(self.gpus)] for k in range(devices)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(run_gpus))
        return environment


class SlurmHandle:
    """A run that is a job of a cluster. Its output goes into `log`."""

    def __init__(self, job: Any, log: Path) -> None:
        self.job = job
        self.log = log
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self.job.done():
            try:
                self.returncode = int(self.job.result())
            except Exception as error:  # submitit's: the job was lost, timed out or cancelled
                with self.log.open("a") as log:
                    log.write(f"\nthe job {self.job.job_id} did not end by itself: {error}\n")
                self.returncode = 1
        return self.returncode

    def interrupt(self) -> None:
        self.job.cancel()

    def kill(self) -> None:
        """Do nothing: after a while the cluster itself ends a cancelled job by force."""


class SlurmLauncher:
    """Starts each run as a job of a cluster, which gives it cores and GPUs.

    Args:
        folder: submitit keeps its files here.
        parameters: go to submitit (`timeout_min=600`, `slurm_partition=gpu`, `cpus_per_task=8`).
            `cluster=local` runs the jobs as processes of this host, to try the launcher out.

    Raises: UserError: submitit is not installed, or refuses the parameters.
    """

    num_threads: int | None = None  # the run itself decides

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
    """Return a parameter's value, read as YAML.

    A time such as `1:30`, which YAML reads as a number, stays a text.

    Raises: UserError: the text is not valid YAML.
    """
    try:
        return text if other_number(text) else yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--slurm {key}={text}: not valid YAML: {reason}") from None


def run_logged(command: list[str], log: str) -> int:
    """Run a command inside a job, append its output to `log`, and return its exit code.

    The run also stops if only the job's own process is killed.
    """
    environment = os.environ | {STARTER: str(os.getpid())}
    with open(log, "ab") as output:
        process = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return process.returncode


Launcher = LocalLauncher | SlurmLauncher


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """Return the ids of the GPUs that this process may use, without loading torch.

    They are those of CUDA_VISIBLE_DEVICES if it is set, else all that nvidia-smi lists. Without
    nvidia-smi there are none.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        return [gpu.strip() for gpu in variable.split(",") if gpu.strip() not in ("", "-1")]
    indices = output_of(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], timeout_s=10)
    return (indices or "").split()
