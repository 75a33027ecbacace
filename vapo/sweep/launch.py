"""Starting runs as processes: of this host here, as jobs of a cluster in `slurm`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

_STOP_S = 15.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Handle(Protocol):
    """A started run."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def stop(self) -> None: ...


class Launcher(Protocol):
    """`num_threads` for each run; None leaves it to the run itself."""

    @property
    def num_threads(self) -> int | None: ...

    def start(self, name: str, command: Sequence[str], log: Path, *, devices: int) -> Handle: ...


def fit_command(config: Path, checkpoint: Path | None) -> list[str]:
    """`vapo fit` in this Python."""
    command = [sys.executable, "-m", "vapo", "fit", "--config", str(config)]
    return command if checkpoint is None else [*command, "--ckpt_path", str(checkpoint)]


@dataclass
class LocalHandle:
    process: subprocess.Popen[bytes]
    slot: int

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        """As Ctrl-C, so that the run ends its MLflow run; then the whole group, by force."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass
class LocalLauncher:
    """`jobs` runs at a time on this host, each with its share of the cores and its own GPUs.

    `keep_open`: a file descriptor that the runs inherit (the sweep's lock).
    """

    jobs: int
    gpus: Sequence[str] = ()
    keep_open: int | None = None
    num_threads: int | None = None
    _started: list[LocalHandle] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.num_threads = max(1, num_cores() // self.jobs)

    def start(self, name: str, command: Sequence[str], log: Path, *, devices: int) -> Handle:
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
        environment = dict(os.environ)
        environment.update(dict.fromkeys(_THREAD_VARIABLES, str(self.num_threads)))
        if self.gpus:
            chosen = [self.gpus[(slot * devices + k) % len(self.gpus)] for k in range(devices)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(chosen))
        return environment


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, without loading torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip() not in ("", "-1")]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()
