"""Show the progress of a sweep's runs, as recorded by the journals in their folders.

On a terminal this is a block that is redrawn below the lines about runs that start and end.
Elsewhere it is a few lines at intervals, printed only if they have changed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vapo.config import FitConfig, resolve
from vapo.errors.shown_text import TextStream, can_redraw, format_seconds, visible
from vapo.sweep.folders import Outcome, TaskFolder
from vapo.sweep.plan import Task
from vapo.sweep.stopping import Stoppable
from vapo.system.progress import Display
from vapo.tracking.journal import read_from
from vapo.tracking.journal_folders import JOURNAL_NAME

_BLOCK_INTERVAL_S = 1.0
_LINE_INTERVAL_S = 60.0
_ITERATION, _SCORE = "progress/iteration", "eval/avg_at_k"
_EXPLAINED_VARIANCE = "critic/explained_variance"


@dataclass
class RunningTask:
    """A task whose process was started, with its latest metrics.

    Attributes:
        started: seconds of the monotonic clock at the start.
        started_at: Unix time at the start.
        latest: metric -> its latest recorded value.
    """

    task: Task
    folder: TaskFolder
    handle: Stoppable
    was_resumed: bool = False
    started: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    latest: dict[str, float] = field(default_factory=dict)
    _journal: Path | None = field(default=None, init=False, repr=False)
    _read_bytes: int = field(default=0, init=False, repr=False)

    def read(self) -> None:
        """Update `latest` with what the run has recorded since the last call."""
        with contextlib.suppress(OSError):  # the journal does not exist yet, or cannot be reached
            if self._journal is None:  # a journal older than this start is of an earlier attempt
                files = [a / "tracking" / JOURNAL_NAME for a in reversed(self.folder.attempts())]
                new_files = (
                    f for f in files if f.is_file() and f.stat().st_mtime >= self.started_at
                )
                self._journal = next((file.parent for file in new_files), None)
            if self._journal is not None:
                records, self._read_bytes = read_from(self._journal, self._read_bytes)
                points = [
                    p for record in records if record.kind == "metrics" for p in record.payload
                ]
                self.latest |= {key: value for key, value, *_ in points}

    def describe(self) -> str:
        """Return how far the run is: `iteration 12 of 40, score 45.3 %`.

        A value pretraining has its critic's explained variance in place of the score.
        """
        if not self.latest:
            return "starting"
        iteration = int(self.latest.get(_ITERATION, 0))
        text = f"iteration {iteration} of {num_iterations(self.task.config)}"
        if self.task.is_pretraining and _EXPLAINED_VARIANCE in self.latest:
            text += f", explained variance {self.latest[_EXPLAINED_VARIANCE]:.2f}"
        elif not self.task.is_pretraining and _SCORE in self.latest:
            text += f", score {100 * self.latest[_SCORE]:.1f} %"
        return text


def num_iterations(config: FitConfig) -> int:
    """Return the number of iterations of both phases. Value pretraining may stop earlier."""
    return resolve(config).value_pretraining_iterations + config.training.num_iterations


def seconds_left(
    tasks: Sequence[Task],
    outcomes: Mapping[str, Outcome],
    running: Sequence[RunningTask],
    jobs: int,
) -> float | None:
    """Estimate the seconds until all tasks have ended, with `jobs` of them at a time.

    A task is expected to take the mean time of the finished tasks of its kind (row or value
    pretraining). Resumed runs do not count there: their seconds cover only a part of the run. The
    result is None if no task is left, or if no task of a remaining kind has finished.
    """
    durations = defaultdict(list)
    for task in tasks:
        outcome = outcomes.get(task.identity)
        if outcome and outcome.state == "finished" and not outcome.was_resumed:
            durations[task.is_pretraining].append(outcome.seconds)
    open_tasks = [task for task in tasks if task.identity not in outcomes]
    if not open_tasks or not all(task.is_pretraining in durations for task in open_tasks):
        return None
    now = time.monotonic()
    elapsed = {run.task.identity: now - run.started for run in running}
    expected = (
        fmean(durations[task.is_pretraining]) - elapsed.get(task.identity, 0) for task in open_tasks
    )
    return sum(max(0.0, seconds) for seconds in expected) / min(jobs, len(open_tasks))


class SweepDisplay:
    """Prints the progress of a sweep. It is a context manager, entered while runs are at work.

    Args:
        stream: None takes standard output.
        live: whether a block can be redrawn there; None asks the stream.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        *,
        stream: TextStream | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = stream or sys.stdout
        self._is_live = can_redraw(stream) if live is None else live
        self._display = Display(stream, self._render if self._is_live else None)
        self._interval_s = _BLOCK_INTERVAL_S if self._is_live else _LINE_INTERVAL_S
        self._clock = clock
        self._runs: list[tuple[str, str, float]] = []  # name, how far it is, when it was started
        self._last_lines: list[str] = []
        self._counts = ""
        self._expected_end: float | None = None
        self.line = self._display.line  # above the block

    def __enter__(self) -> SweepDisplay:
        self._started = self._updated_at = self._clock()
        self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.clear()
        self._display.stop()

    def update(self, running: Sequence[RunningTask], counts: str, left_s: float | None) -> None:
        """Show how far the running tasks are, unless they were shown a moment ago.

        It may be called as often as one likes. In a terminal that can redraw, a new set of running
        tasks is shown at once. Elsewhere, lines that have not changed are not printed again.

        Args:
            counts: a text on how many runs have ended, are running and are to come.
            left_s: the estimated seconds to the end; None if unknown.
        """
        now = self._clock()
        names = [run.task.name for run in running]
        is_new = self._is_live and names != [name for name, *_ in self._runs]
        if now - self._updated_at < self._interval_s and not is_new:
            return
        self._updated_at = now
        for run in running:
            run.read()
        self._runs = [
            (visible(run.task.name, keep=""), run.describe(), run.started) for run in running
        ]
        self._counts, self._expected_end = counts, None if left_s is None else now + left_s
        lines = [f"    {name}: {how_far}" for name, how_far, _ in self._runs]
        if not self._is_live and lines and lines != self._last_lines:
            self.line("\n".join([f"{counts} | {self._times(now)}", *lines]))
            self._last_lines = lines

    def _times(self, now: float) -> str:
        text = f"{format_seconds(now - self._started)} elapsed"
        if self._expected_end is None:
            return text
        return f"{text}, about {format_seconds(max(0.0, self._expected_end - now))} left"

    def _render(self) -> RenderableType:
        """Return the terminal's block: a line on the sweep, then one for each running task.

        It is empty before the first `update`.
        """
        if not self._counts:
            return Group()
        now = self._clock()
        grid = Table.grid(padding=(0, 2))
        for name, how_far, started in list(self._runs):
            time_s = Text(format_seconds(now - started), style="dim")
            grid.add_row(Text(f"  {name}"), Text(how_far, style="green"), time_s)
        whole = Text(self._counts, style="bold").append(f" | {self._times(now)}", style="dim")
        return Group(whole, grid)
