"""The progress display of a run: its iterations, and the stages inside each of them.

On a terminal a block below the lines is redrawn in place; elsewhere there are only lines. Ranks
other than 0 show nothing. Seconds per stage are recorded in every case.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import IO, Protocol, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vapo.errors.redactor import without_hidden
from vapo.errors.shown_text import (
    TextStream,
    can_redraw,
    describe_metrics,
    format_seconds,
    say,
    visible,
)
from vapo.system.process import is_main_process

_RECENT_ITERATIONS = 5
_SHORT_S = 1.0  # a stage without a count that ends sooner is not worth a line


@dataclass
class StageState:
    """A stage that is running: its name, its count of units done, and the time at which it
    began."""

    name: str
    total: float | None
    unit: str
    start_time: float
    num_done: float = 0


def describe_count(state: StageState) -> str:
    if state.total is None and state.num_done == 0:
        return ""
    total = f"/{state.total:g}" if state.total is not None else ""
    return f"{state.num_done:g}{total} {state.unit}"


def describe_speed(state: StageState, now: float) -> str:
    """Return a text with a stage's mean speed and time left; empty before anything is done."""
    elapsed = now - state.start_time
    if state.num_done <= 0 or elapsed <= 0:
        return ""
    speed = state.num_done / elapsed
    text = f"{speed:.3g}/s" if speed < 100 else f"{speed:.0f}/s"
    if state.total is not None and state.num_done < state.total:
        text += f", {format_seconds((state.total - state.num_done) / speed)} left"
    return text


def describe_stage(state: StageState, now: float) -> str:
    parts = [describe_count(state), f"{now - state.start_time:.1f} s", describe_speed(state, now)]
    return f"{state.name}: " + ", ".join(part for part in parts if part)


def stage_bars(stages: Sequence[StageState], now: float) -> Table:
    """Return a table with bar, count and speed of each running stage, inner ones indented."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(width=30)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, style="cyan")
    for depth, state in enumerate(stages):
        bar = ProgressBar(total=state.total, completed=state.num_done, pulse=state.total is None)
        name = "  " * depth + state.name
        grid.add_row(name, bar, describe_count(state), describe_speed(state, now))
    return grid


class Display:
    """Writes lines to a stream. On a terminal, what `render` returns is redrawn below the lines."""

    def __init__(self, stream: TextStream, render: Callable[[], RenderableType] | None) -> None:
        self._stream, self._render = stream, render
        self._console = Console(file=cast(IO[str], stream), force_terminal=True, highlight=False)
        self._until_stopped = ExitStack()

    def start(self) -> None:
        if self._render is None:
            return
        owns_stdout = self._console.file in (sys.stdout, sys.__stdout__)
        originals = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            redirect_stdout=owns_stdout,
            redirect_stderr=owns_stdout,
        )
        self._until_stopped.enter_context(live)
        if not owns_stdout:
            return
        loggers = [logging.getLogger(name) for name in list(logging.Logger.manager.loggerDict)]
        for handler in [h for logger in (logging.getLogger(), *loggers) for h in logger.handlers]:
            stream = getattr(handler, "stream", None)
            if isinstance(handler, logging.StreamHandler) and stream in originals:
                # log lines go above the block too, instead of tearing it
                handler.setStream(sys.stderr)
                self._until_stopped.callback(handler.setStream, stream)

    def stop(self) -> None:
        self._until_stopped.close()

    def line(self, text: str) -> None:
        if self._render is None:
            say(text, file=self._stream)
        else:
            self._console.print(visible(without_hidden(text)), markup=False)


Advance = Callable[[float], None]
"""Reports that this many more units of the running stage are done."""


class Stage(Protocol):
    """The type of `Progress.stage`, which opens a stage and gives a progress function."""

    def __call__(
        self, name: str, total: float | None = None, unit: str = "items"
    ) -> AbstractContextManager[Advance]: ...


class Progress:
    """Shows and times the stages of a run. Use as a context manager.

        with Progress() as progress:
            progress.iteration(1, 60, Phase.VALUE_PRETRAINING)
            with progress.stage("rollout", total=256, unit="responses") as advance:
                advance(8)
            progress.metrics({"rollout/reward_mean": 0.25})

    A stage may be entered outside an iteration (an evaluation before the first one). Inside another
    stage it has a bar of its own, but its seconds belong to the outermost stage: what an evaluation
    samples is evaluation time, not rollout time.
    """

    def __init__(
        self,
        *,
        stream: TextStream | None = None,
        live: bool | None = None,
        enabled: bool | None = None,
        line_interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = stream or sys.stdout
        if live is None:
            live = can_redraw(stream)
        enabled = is_main_process() if enabled is None else enabled
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.poll: Callable[[], None] = lambda: None  # may raise, to stop the stage
        self.stage_seconds: dict[str, float] = {}
        self._iteration_seconds: dict[str, float] = {}
        self._line_seconds: dict[str, float] = {}
        self._clock = clock
        self._start_time = clock()
        self._stages: list[StageState] = []
        self._position = ""  # as `iteration 3/7 (policy optimization)`
        self._metrics: dict[str, float] = {}
        self._iteration_open = False
        self._iteration_start_time: float | None = None
        self._evaluation_s = 0.0  # the latest evaluation's time, as few iterations have one
        self._iteration_evaluation_s = 0.0  # the time of evaluations in the running iteration
        self._phase = ""
        self._durations: dict[str, deque[float]] = {}  # each phase's latest iterations, in seconds
        self._expected_end: float | None = None
        self._num_later = 0
        self._line_interval_s = line_interval_s
        self._is_plain = enabled and not live
        self._display = Display(stream, self._render if live else None) if enabled else None

    def __enter__(self) -> Progress:
        self._start_time = self._clock()
        if self._display:
            self._display.start()
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        try:
            if raised is None:
                self._close_iteration()
            elif self._position:
                self.note(f"stopped in {self._position}")
        finally:
            self._stages.clear()
            self._expected_end = None
            if self._display:
                self._display.stop()

    def iteration(
        self, index: int, total: int, phase: str, *, num_evaluations: int = 0, num_later: int = 0
    ) -> None:
        """Begin iteration `index` of `total` (1-based, all phases counted).

        Args:
            num_evaluations: evaluations that are still to come; the time left includes them.
            num_later: how many of the last iterations belong to the next phase. Their time is not
                known before one of them has run, so the time left is that of this phase.
        """
        self._close_iteration()
        now = self._clock()
        if self._iteration_start_time is not None:
            recent = self._durations.setdefault(self._phase, deque(maxlen=_RECENT_ITERATIONS))
            recent.append(now - self._iteration_start_time - self._iteration_evaluation_s)
        self._phase, self._num_later, self._expected_end = str(phase), num_later, None
        if recent_seconds := self._durations.get(self._phase):
            left_s = sum(recent_seconds) / len(recent_seconds) * (total - num_later - index + 1)
            evaluations_s = 0.0 if num_later else self._evaluation_s * num_evaluations
            self._expected_end = now + left_s + evaluations_s
        self._iteration_evaluation_s = 0.0
        self._iteration_start_time = now
        self._iteration_open = True
        self._is_last = index >= total
        self._position = f"iteration {index}/{total} ({str(phase).replace('_', ' ')})"

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Show the iteration's metrics (see `describe_metrics`), and end its line."""
        self._metrics = dict(metrics)
        self._close_iteration()

    def note(self, text: str) -> None:
        """Show a line above the display."""
        if self._display:
            self._display.line(text)

    @contextmanager
    def stage(
        self, name: str, total: float | None = None, unit: str = "items"
    ) -> Iterator[Advance]:
        """Show and time the block as a stage; yield a function that adds to the units done.

        `total` is the number of units, or None if it is not known beforehand.
        """
        reported_at = self._clock()
        state = StageState(name, total, unit, start_time=reported_at)
        self._stages.append(state)

        def advance(n: float) -> None:
            nonlocal reported_at
            state.num_done += n
            now = self._clock()
            if self._is_plain and now - reported_at >= self._line_interval_s:
                reported_at = now
                self.note(f"  {describe_stage(state, now)}")
            self.poll()

        completed = False
        try:
            with self.annotate(name):
                yield advance
            completed = True
        finally:
            if state in self._stages:
                self._stages.remove(state)
            if not self._stages:
                self._record(state, completed)

    @property
    def running_stage(self) -> str:
        """The name of the outermost running stage, which gets the seconds; empty between stages.

        Another thread may read it.
        """
        outermost = self._stages[:1]
        return outermost[0].name if outermost else ""

    def pop_iteration_seconds(self) -> dict[str, float]:
        """Return the seconds of each outermost stage since the last call."""
        seconds, self._iteration_seconds = self._iteration_seconds, {}
        return seconds

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add the seconds of a stage that is over and was not shown."""
        records = [self.stage_seconds, self._iteration_seconds]
        if seconds >= _SHORT_S:
            records.append(self._line_seconds)
        for record in records:
            record[name] = record.get(name, 0.0) + seconds

    def _record(self, state: StageState, completed: bool) -> None:
        now = self._clock()
        for record in (self.stage_seconds, self._iteration_seconds, self._line_seconds):
            record[state.name] = record.get(state.name, 0.0) + now - state.start_time
        if state.name == "evaluation" and completed:
            self._evaluation_s = now - state.start_time
            self._iteration_evaluation_s += self._evaluation_s
        is_long = bool(state.num_done) or now - state.start_time >= _SHORT_S
        if completed and is_long and not self._iteration_open and self._is_plain:
            self.note(describe_stage(state, now))
            self._line_seconds.clear()

    def _close_iteration(self) -> None:
        if self._iteration_open and self._is_plain:
            seconds = ", ".join(f"{name} {s:.1f} s" for name, s in self._line_seconds.items())
            parts = [self._position, describe_metrics(self._metrics), seconds]
            parts += [] if self._is_last else [self._left()]
            self.note(" | ".join(part for part in parts if part))
        if self._iteration_open:
            self._line_seconds.clear()
        self._iteration_open = False

    def _left(self) -> str:
        if self._expected_end is None:
            return ""
        text = f"about {format_seconds(max(0.0, self._expected_end - self._clock()))} left"
        if self._num_later:
            text += f" of this phase, then {self._num_later} iterations of the next"
        return text

    def _render(self) -> RenderableType:
        """Return what a terminal shows below the lines: position, stages and latest metrics."""
        now = self._clock()
        rows: list[RenderableType] = []
        if self._position:
            times = [f"  {format_seconds(now - self._start_time)} elapsed", self._left()]
            text = Text(self._position, style="bold")
            rows.append(text.append(", ".join(filter(None, times)), style="dim"))
        if self._stages:
            rows.append(stage_bars(list(self._stages), now))
        if self._metrics:
            rows.append(Text(describe_metrics(self._metrics), style="green"))
        return Group(*rows)
