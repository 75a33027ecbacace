"""Runs as jobs of a Slurm cluster, through submitit (the extra `slurm`)."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vapo.errors import UserError
from vapo.sweep.launch import Handle
from vapo.system.installation import install_command


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

    def stop(self) -> None:
        self.job.cancel()


class SlurmLauncher:
    """Each run is one job. Cores and GPUs are the job's own, so nothing is assigned here.

    `parameters` go to submitit (`timeout_min=600`, `slurm_partition=gpu`, `cpus_per_task=8`);
    `cluster=local` runs the jobs as processes of this host, to try the launcher out.

    Raises: UserError: submitit is not installed, or refuses the parameters.
    """

    num_threads = None

    def __init__(self, folder: Path, parameters: Mapping[str, str]) -> None:
        try:
            import submitit
        except ImportError:
            raise UserError(
                f"--launcher slurm needs the package submitit: {install_command('slurm')}"
            ) from None
        options = {key: yaml.safe_load(value) for key, value in parameters.items()}
        cluster = options.pop("cluster", "slurm")
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self.executor.update_parameters(**options)
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            raise UserError(f"--launcher slurm: submitit says: {error}") from None

    def start(self, name: str, command: Sequence[str], log: Path, *, devices: int) -> Handle:
        self.executor.update_parameters(name=name)
        return SlurmHandle(self.executor.submit(run_logged, list(command), str(log)), log)


def run_logged(command: list[str], log: str) -> int:
    """Runs inside the job: the process, its output at the end of `log`; returns its exit code."""
    with open(log, "ab") as output:
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
