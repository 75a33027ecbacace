"""The progress of a sweep: a line when a run starts or ends, and how far the running ones are.

On a terminal that is a block below the lines; elsewhere a line now and then, if it has changed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vapo.sweep.running import Running
from vapo.system.progress import Display, can_redraw, format_seconds
from vapo.system.shown_text import TextStream, visible

_READ_INTERVAL_S = 1.0


class SweepDisplay:
    """Use as a context manager while runs are at work.

    Args:
        stream: None: standard output.
        live: whether it is a terminal on which a block can be redrawn; None: find out.
        line_interval_s: elsewhere the least time between two lines on how far the runs are.
    """

    def __init__(
        self,
        *,
        stream: TextStream | None = None,
        live: bool | None = None,
        line_interval_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = stream or sys.stdout
        if live is None:
            live = can_redraw(stream)
        self._is_live = live
        self._display = Display(stream, self._render if live else None)
        self._interval_s = _READ_INTERVAL_S if live else line_interval_s
        self._clock = clock
        self._started = self._updated_at = clock()
        self._runs: list[tuple[str, str, float]] = []  # name, how far it is, when it was started
        self._said: list[str] = []
        self._counts = ""
        self._expected_end: float | None = None

    def __enter__(self) -> SweepDisplay:
        self._started = self._updated_at = self._clock()
        self._display.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runs.clear()
        self._display.stop()

    def line(self, text: str) -> None:
        """A line above the block."""
        self._display.line(text)

    def update(
        self, running: Sequence[Running], counts: str, seconds_left: Callable[[], float | None]
    ) -> None:
        """Say how far the running ones are, unless that was just done; may be called at any time.

        Args:
            counts: how many of the runs are done, running and left, in words.
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
        left = seconds_left()
        self._counts, self._expected_end = counts, None if left is None else now + left
        said = [f"{name}: {how_far}" for name, how_far, _ in self._runs]
        if not self._is_live and said and said != self._said:
            self.line("\n".join([f"{counts} | {self._times(now)}", *(f"    {s}" for s in said)]))
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
