"""Working through the tasks: what is ready is started, what ends is reported, failures are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vapo.config import FitConfig
from vapo.config.written import to_yaml
from vapo.sweep.display import Running, SweepDisplay, seconds_left
from vapo.sweep.folders import Outcome, TaskFolder
from vapo.sweep.launch import Launcher, fit_command
from vapo.sweep.plan import Task, set_key
from vapo.sweep.stopping import SweepSignals
from vapo.system.shown_text import format_seconds

_POLL_S = 0.2


@dataclass
class Work:
    """Runs tasks, at most `jobs` at a time, each after the one that it needs.

    `prepare` gives a task's config its MLflow names and tags; `ended` is called with every outcome.
    """

    tasks: Sequence[Task]
    sweep_dir: Path
    launcher: Launcher
    jobs: int
    prepare: Callable[[Task, FitConfig], FitConfig]
    ended: Callable[[Task, Outcome], None] = lambda task, outcome: None
    abandoned: Callable[[Path], None] = lambda attempt: None
    display: SweepDisplay = field(default_factory=SweepDisplay)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    signals: SweepSignals = field(default_factory=SweepSignals)

    def run(self) -> dict[str, Outcome]:
        """Outcome by identity. A signal that ends it stops the running processes first."""
        for task in self.tasks:
            if (outcome := TaskFolder(self.sweep_dir, task).finished()) is not None:
                self._settle(task, outcome)
        waiting = [task for task in self.tasks if task.identity not in self.outcomes]
        with self.signals.taken():
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
            needed = None if task.needs is None else self.outcomes.get(task.needs)
            if needed is not None and needed.state != "finished":
                waiting.remove(task)
                first = next(one for one in self.tasks if one.identity == task.needs)
                of = "" if first.row.name == task.row.name else f" ({first.name})"
                log = TaskFolder(self.sweep_dir, first).log
                reason = f"its value pretraining failed{of}; log: {log}"
                self._settle(task, Outcome("blocked", reason=reason))
            elif len(self.running) < self.jobs and (task.needs is None or needed is not None):
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
        with self.signals.held():
            handle = self.launcher.start(task.name, command, folder.log, devices=devices)
            self.running.append(Running(task, folder, handle, was_resumed=checkpoint is not None))
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
        left = self._seconds_left()
        about = "" if left is None else f"; about {format_seconds(left)} left"
        total = str(len(self.tasks))
        done = f"[{len(self.outcomes):>{len(total)}}/{total}]"
        self.display.line(f"{done} {task.name} {_describe(outcome)}{about}")
        if outcome.state == "failed":
            lines = [f"    | {line}" for line in outcome.reason.splitlines()]
            log = TaskFolder(self.sweep_dir, task).log
            self.display.line("\n".join([*lines, f"    | the whole log: {log}"]))
        self.ended(task, outcome)

    def _counts(self) -> str:
        """`3 of 14 finished, 1 failed, 2 running, 8 to come`."""
        states = [outcome.state for outcome in self.outcomes.values()]
        numbers = {
            "failed": states.count("failed"),
            "blocked by them": states.count("blocked"),
            "running": len(self.running),
            "to come": len(self.tasks) - len(states) - len(self.running),
        }
        parts = [f"{number} {what}" for what, number in numbers.items() if number]
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
