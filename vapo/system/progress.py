"""One progress display for a whole run: iterations, and the stages inside each of them.

The display is live on a terminal and plain lines elsewhere (see `progress_display`); on ranks
other than 0 nothing is shown. Seconds per stage are recorded in every case.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Protocol, runtime_checkable

from vapo.system.main_process import is_main_process
from vapo.system.progress_display import (
    Headline,
    LiveDisplay,
    PlainDisplay,
    StageState,
    TextStream,
    describe_stage,
)

_RECENT_ITERATIONS = 5


@runtime_checkable
class Advance(Protocol):
    """Reports that `n` more units of the running stage are done."""

    def __call__(self, n: float = 1) -> None: ...


def _is_live_terminal(stream: TextStream) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


class Progress:
    """Shows and times the stages of a run. Use as a context manager.

        with Progress() as progress:
            progress.iteration(1, 60, Phase.VALUE_PRETRAINING)
            with progress.stage("rollout", total=256, unit="responses") as advance:
                advance(8)
            progress.metrics({"rollout/reward_mean": 0.25})

    A stage may be entered outside an iteration (an evaluation before the first one). Inside
    another stage it has a bar of its own, but its seconds belong to the outermost stage: what
    an evaluation samples is evaluation time, not rollout time.
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
        live = _is_live_terminal(stream) if live is None else live
        enabled = is_main_process() if enabled is None else enabled
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.poll: Callable[[], None] = lambda: None  # may raise, to stop the stage
        self.stage_seconds: dict[str, float] = {}
        self._iteration_seconds: dict[str, float] = {}
        self._line_seconds: dict[str, float] = {}
        self._clock = clock
        self._stages: list[StageState] = []
        self._headline = Headline(started=clock())
        self._iteration_open = False
        self._iteration_started: float | None = None
        self._durations: deque[float] = deque(maxlen=_RECENT_ITERATIONS)
        self._display: LiveDisplay | PlainDisplay | None = None
        if enabled and live:
            self._display = LiveDisplay(stream, self._headline, self._stages, clock)
        elif enabled:
            self._display = PlainDisplay(stream, clock, line_interval_s)

    def __enter__(self) -> Progress:
        self._headline.started = self._clock()
        if self._display:
            self._display.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._display and exc_type is not None and self._headline.total:
                self._display.line(f"stopped in {self._headline.position()}")
            elif exc_type is None:
                self._close_iteration()
        finally:
            self._stages.clear()
            self._headline.remaining_s = None
            if self._display:
                self._display.stop()

    def iteration(self, index: int, total: int, phase: str) -> None:
        """Iteration `index` of `total` (1-based, all phases counted) begins."""
        self._close_iteration()
        now = self._clock()
        if self._iteration_started is not None:
            self._durations.append(now - self._iteration_started)
        self._iteration_started = now
        self._iteration_open = True
        self._headline.index, self._headline.total = index, total
        self._headline.phase = str(phase).replace("_", " ")
        if self._durations:
            mean_s = sum(self._durations) / len(self._durations)
            self._headline.remaining_s = mean_s * (total - index + 1)
            self._headline.remaining_at = now

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """The iteration's results; ends its line. Known keys get short names and come alone."""
        self._headline.metrics = dict(metrics)
        self._close_iteration()

    def note(self, text: str) -> None:
        """One line above the display."""
        if self._display:
            self._display.line(text)

    @contextmanager
    def stage(
        self, name: str, total: float | None = None, unit: str = "items"
    ) -> Iterator[Advance]:
        """A stage with a count; `total` None when it is not known beforehand."""
        state = StageState(name, total, unit, started=self._clock())
        self._stages.append(state)

        def advance(n: float = 1) -> None:
            state.done += n
            if self._display:
                self._display.advanced(state)
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

    def pop_iteration_seconds(self) -> dict[str, float]:
        """Seconds of each stage since the last call."""
        seconds, self._iteration_seconds = self._iteration_seconds, {}
        return seconds

    def _record(self, state: StageState, completed: bool) -> None:
        seconds = self._clock() - state.started
        for record in (self.stage_seconds, self._iteration_seconds, self._line_seconds):
            record[state.name] = record.get(state.name, 0.0) + seconds
        if completed and not self._iteration_open and isinstance(self._display, PlainDisplay):
            self._display.line(describe_stage(state, self._clock()))
            self._line_seconds.clear()

    def _close_iteration(self) -> None:
        if not self._iteration_open:
            return
        self._iteration_open = False
        if self._display:
            self._display.iteration_finished(self._headline, self._line_seconds)
        self._line_seconds = {}
