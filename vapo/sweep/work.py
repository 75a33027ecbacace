"""Work through a sweep's tasks: start the ones that are ready, and report the ones that end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vapo.config import FitConfig
from vapo.config.written import to_yaml
from vapo.errors.shown_text import format_seconds
from vapo.sweep.display import RunningTask, SweepDisplay, seconds_left
from vapo.sweep.folders import Outcome, TaskFolder
from vapo.sweep.launch import Launcher, fit_command
from vapo.sweep.plan import Task, set_key
from vapo.sweep.stopping import SweepSignals

_POLL_S = 0.2


@dataclass
class TaskRunner:
    """Runs tasks, at most `jobs` at a time, each after the value pretraining that it needs.

    Attributes:
        launcher: starts the processes.
        prepare: gives a task's config its MLflow name and tags.
        on_end: called with every task and its outcome.
        abandoned: called with the folder of each earlier attempt when a run starts anew.
        outcomes: identity -> outcome of each task that has ended.
    """

    tasks: Sequence[Task]
    sweep_dir: Path
    launcher: Launcher
    jobs: int
    prepare: Callable[[Task, FitConfig], FitConfig]
    on_end: Callable[[Task, Outcome], None] = lambda task, outcome: None
    abandoned: Callable[[Path], None] = lambda attempt: None
    display: SweepDisplay = field(default_factory=SweepDisplay)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: list[RunningTask] = field(default_factory=list)
    signals: SweepSignals = field(default_factory=SweepSignals)

    def run(self) -> dict[str, Outcome]:
        """Run all tasks, and return their outcomes by identity.

        A task that an earlier sweep in this folder has finished is not run again.

        A signal or an error stops the running processes before it is raised.
        """
        for task in self.tasks:
            if (outcome := TaskFolder(self.sweep_dir, task).finished()) is not None:
                self._settle(task, outcome)
        waiting = [task for task in self.tasks if task.identity not in self.outcomes]
        with self.signals.catching():
            try:
                with self.display:
                    while waiting or self.running:
                        self._start_ready(waiting)
                        self._collect()
                        self.display.update(self.running, self._counts(), self._seconds_left())
                        if self.running:
                            time.sleep(_POLL_S)
            except BaseException:
                self.signals.stop([run.handle for run in self.running])
                raise
        return self.outcomes

    def _start_ready(self, waiting: list[Task]) -> None:
        for task in list(waiting):
            pretraining_outcome = None if task.needs is None else self.outcomes.get(task.needs)
            if pretraining_outcome is not None and pretraining_outcome.state != "finished":
                waiting.remove(task)
                pretraining = next(
                    other_task for other_task in self.tasks if other_task.identity == task.needs
                )
                row_note = "" if pretraining.row.name == task.row.name else f" ({pretraining.name})"
                log = TaskFolder(self.sweep_dir, pretraining).log
                reason = f"its value pretraining failed{row_note}; log: {log}"
                self._settle(task, Outcome("blocked", reason=reason))
            elif len(self.running) < self.jobs and (
                task.needs is None or pretraining_outcome is not None
            ):
                waiting.remove(task)
                self._start(task)

    def _start(self, task: Task) -> None:
        folder = TaskFolder(self.sweep_dir, task)
        folder.path.mkdir(parents=True, exist_ok=True)
        checkpoint = folder.checkpoint()
        if checkpoint is None:
            for attempt in folder.attempts():
                self.abandoned(attempt)
        config = replace(task.config, output_dir=str(folder.output_dir))
        if task.needs is not None:
            critic = f"{self.outcomes[task.needs].run_dir}/pretrained_critic"
            config = set_key(config, "critic.init", critic)
        if config.trainer.num_threads is None:
            config = set_key(config, "trainer.num_threads", self.launcher.num_threads)
        folder.config.write_text(to_yaml(self.prepare(task, config)))
        command, devices = fit_command(folder.config, checkpoint), config.trainer.devices
        with self.signals.deferred():
            handle = self.launcher.start(task.name, command, folder.log, devices=devices)
            self.running.append(
                RunningTask(task, folder, handle, was_resumed=checkpoint is not None)
            )
        how = "resumes from a checkpoint" if checkpoint else "started"
        self.display.line(f"        {task.name} {how}")

    def _collect(self) -> None:
        for run in list(self.running):
            returncode = run.handle.poll()
            if returncode is not None:
                self.running.remove(run)
                seconds = time.monotonic() - run.started
                outcome = run.folder.end(returncode, seconds, was_resumed=run.was_resumed)
                self._settle(run.task, outcome)

    def _settle(self, task: Task, outcome: Outcome) -> None:
        self.outcomes[task.identity] = outcome
        remaining_s = self._seconds_left()
        about = "" if remaining_s is None else f"; about {format_seconds(remaining_s)} left"
        total = str(len(self.tasks))
        progress = f"[{len(self.outcomes):>{len(total)}}/{total}]"
        self.display.line(f"{progress} {task.name} {_describe(outcome)}{about}")
        if outcome.state == "failed":
            lines = [f"    | {line}" for line in outcome.reason.splitlines()]
            log = TaskFolder(self.sweep_dir, task).log
            self.display.line("\n".join([*lines, f"    | the whole log: {log}"]))
        self.on_end(task, outcome)

    def _counts(self) -> str:
        """Return the numbers of tasks by state: `3 of 14 finished, 1 failed, 2 running, 8 to
        come`.
        """
        states = [outcome.state for outcome in self.outcomes.values()]
        numbers = {
            "failed": states.count("failed"),
            "blocked by them": states.count("blocked"),
            "running": len(self.running),
            "to come": len(self.tasks) - len(states) - len(self.running),
        }
        parts = [f"{number} {state}" for state, number in numbers.items() if number]
        return ", ".join([f"{states.count('finished')} of {len(self.tasks)} finished", *parts])

    def _seconds_left(self) -> float | None:
        return seconds_left(self.tasks, self.outcomes, self.running, self.jobs)


def _describe(outcome: Outcome) -> str:
    if outcome.was_done:
        text = "was finished before"
    elif outcome.state == "blocked":
        text = f"not started: {outcome.reason}"
    else:
        text = f"{outcome.state} after {format_seconds(outcome.seconds)}"
    return text if outcome.score is None else f"{text}, score {100 * outcome.score:.1f} %"
