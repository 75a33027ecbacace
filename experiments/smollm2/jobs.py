"""Processes that each take one run of `vapo fit` after the other, and what became of the runs."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from vapo.sweep.plan import Task


class Outcome(NamedTuple):
    """`run` is the folder of a run that ended well, else None with a reason."""

    run: Path | None
    seconds: float
    reason: str
    log: Path


def work(connection: Connection, log: Path, policies: int) -> None:
    """Run each config file that comes, until there is no more; all output goes into the log."""
    with log.open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.path.insert(0, str(Path(__file__).parent))
    import vapo

    while True:
        try:
            path = connection.recv()
        except EOFError:
            return
        try:
            config = vapo.load_config(path)
            callbacks: list[Any] = []
            if policies:
                from kept_policies import KeepPolicies  # loads torch

                callbacks = [KeepPolicies(Path(config.output_dir) / "policies", policies)]
            run = vapo.fit(config, callbacks=callbacks)
            connection.send((str(run.folder), ""))
        except Exception as error:
            traceback.print_exc()
            connection.send((None, f"{type(error).__name__}: {error}"))


@dataclass
class Job:
    """One process, and the run that it is at."""

    process: SpawnProcess
    connection: Connection
    log: Path
    task: Task | None = None
    start_time: float = 0.0
    num_runs: int = 0

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


@dataclass
class Jobs:
    """At most `number` processes. Each ends after `runs_each` runs (None: after all of them).

    Args:
        policies: how many of a run's last policies are kept.
    """

    number: int
    folder: Path
    runs_each: int | None = None
    policies: int = 0
    jobs: list[Job] = field(default_factory=list)
    num_started: int = 0

    @property
    def running(self) -> list[Task]:
        return [job.task for job in self.jobs if job.task is not None]

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.number

    def start(self, task: Task, config: Path) -> None:
        """Give the run to a process that is idle, else to a new one."""
        job = next((job for job in self.jobs if job.task is None), None) or self._new()
        job.task, job.start_time = task, time.monotonic()
        job.connection.send(config)

    def _new(self) -> Job:
        self.num_started += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"job_{self.num_started:02d}.log"
        context = get_context("spawn")
        parent_end, child_end = context.Pipe()
        process = context.Process(target=work, args=(child_end, log, self.policies))
        process.start()
        child_end.close()
        self.jobs.append(Job(process, parent_end, log))
        return self.jobs[-1]

    def ended(self, wait_s: float) -> Iterator[tuple[Task, Outcome]]:
        """The runs that have ended; a process that died ends its run."""
        ready = wait([job.connection for job in self.jobs if job.task is not None], wait_s)
        for job in [job for job in self.jobs if job.connection in ready]:
            task, seconds = job.task, time.monotonic() - job.start_time
            assert task is not None
            job.task, job.num_runs = None, job.num_runs + 1
            try:
                folder, reason = job.connection.recv()
            except (EOFError, ConnectionError):
                job.process.join()
                folder, reason = None, f"its process ended with {job.process.exitcode}"
            if job.process.exitcode is not None or job.num_runs == self.runs_each:
                job.end()
                self.jobs.remove(job)
            run = None if folder is None else Path(folder)
            yield task, Outcome(run, seconds, reason, job.log)

    def end(self) -> None:
        """What still runs is ended by force: its last checkpoint, if any, is where it resumes."""
        for job in self.jobs:
            job.end()
        self.jobs.clear()
