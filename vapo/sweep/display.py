"""How far the runs of a sweep are, by the journals in their folders: lines, or a block below them.

On a terminal it is a block below the lines on what starts and ends; elsewhere a line now and then,
if it has changed.
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
from vapo.sweep.folders import Outcome, TaskFolder
from vapo.sweep.plan import Task
from vapo.sweep.stopping import Stoppable
from vapo.system.progress import Display
from vapo.system.shown_text import TextStream, can_redraw, format_seconds, visible
from vapo.tracking.journal import read_from
from vapo.tracking.journal_folders import JOURNAL_NAME

_BLOCK_INTERVAL_S = 1.0
_LINE_INTERVAL_S = 60.0
_ITERATION, _SCORE = "progress/iteration", "eval/avg_at_k"
_EXPLAINED_VARIANCE = "critic/explained_variance"


@dataclass
class Running:
    """A task whose process was started; `latest`: of each metric that it recorded the last value.

    `started`, `started_at`: by the monotonic clock, and as Unix time, in seconds.
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
        """Take in what the run has recorded since the last call; nothing while it starts up."""
        with contextlib.suppress(OSError):  # not made yet, or of a file system that is away
            if self._journal is None:  # an earlier attempt's was not written to since the start
                files = [a / "tracking" / JOURNAL_NAME for a in reversed(self.folder.attempts())]
                own = (f for f in files if f.is_file() and f.stat().st_mtime >= self.started_at)
                self._journal = next((file.parent for file in own), None)
            if self._journal is not None:
                records, self._read_bytes = read_from(self._journal, self._read_bytes)
                points = [p for one in records if one.kind == "metrics" for p in one.payload]
                self.latest |= {key: value for key, value, *_ in points}

    def describe(self) -> str:
        """`iteration 12 of 40, score 45.3 %`; of a value pretraining, what its critic explains."""
        if not self.latest:
            return "starting"
        done = int(self.latest.get(_ITERATION, 0))
        text = f"iteration {done} of {num_iterations(self.task.config)}"
        if self.task.is_pretraining and _EXPLAINED_VARIANCE in self.latest:
            text += f", explained variance {self.latest[_EXPLAINED_VARIANCE]:.2f}"
        elif not self.task.is_pretraining and _SCORE in self.latest:
            text += f", score {100 * self.latest[_SCORE]:.1f} %"
        return text


def num_iterations(config: FitConfig) -> int:
    """Of both phases; value pretraining may stop before its last one."""
    return resolve(config).value_pretraining_iterations + config.training.num_iterations


def seconds_left(
    tasks: Sequence[Task], outcomes: Mapping[str, Outcome], running: Sequence[Running], jobs: int
) -> float | None:
    """Until all is done, `jobs` at a time; None where a task's time is not known, or none is left.

    Each is expected to take the mean of those of its kind, row or value pretraining, that have
    finished. The seconds of a resumed run are a part of it, and do not count.
    """
    took = defaultdict(list)
    for task in tasks:
        outcome = outcomes.get(task.identity)
        if outcome and outcome.state == "finished" and not outcome.was_resumed:
            took[task.is_pretraining].append(outcome.seconds)
    left = [task for task in tasks if task.identity not in outcomes]
    if not left or not all(task.is_pretraining in took for task in left):
        return None
    now = time.monotonic()
    elapsed = {run.task.identity: now - run.started for run in running}
    expected = (fmean(took[task.is_pretraining]) - elapsed.get(task.identity, 0) for task in left)
    return sum(max(0.0, seconds) for seconds in expected) / min(jobs, len(left))


class SweepDisplay:
    """Use as a context manager while runs are at work.

    `stream`: None: standard output. `live`: whether a block can be redrawn there; None: find out.
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
        self._said: list[str] = []
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

    def update(self, running: Sequence[Running], counts: str, left_s: float | None) -> None:
        """Say how far the running ones are, unless that was just done; may be called at any time.

        `counts`: how many of the runs are done, running and left, in words.
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
        said = [f"    {name}: {how_far}" for name, how_far, _ in self._runs]
        if not self._is_live and said and said != self._said:
            self.line("\n".join([f"{counts} | {self._times(now)}", *said]))
            self._said = said

    def _times(self, now: float) -> str:
        text = f"{format_seconds(now - self._started)} elapsed"
        if self._expected_end is None:
            return text
        return f"{text}, about {format_seconds(max(0.0, self._expected_end - now))} left"

    def _render(self) -> RenderableType:
        """The block on a terminal: the whole sweep, then the running ones, each with its time."""
        if not self._counts:
            return Group()
        now = self._clock()
        grid = Table.grid(padding=(0, 2))
        for name, how_far, started in list(self._runs):
            time_s = Text(format_seconds(now - started), style="dim")
            grid.add_row(Text(f"  {name}"), Text(how_far, style="green"), time_s)
        whole = Text(self._counts, style="bold").append(f" | {self._times(now)}", style="dim")
        return Group(whole, grid)
