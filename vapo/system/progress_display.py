"""How progress looks: a live block on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Protocol, cast, runtime_checkable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_SHORT_NAMES = {
    "eval/avg_at_k": "avg@k",
    "rollout/reward_mean": "reward",
    "rollout/accuracy": "accuracy",
    "rollout/response_length_mean": "length",
    "actor/entropy": "entropy",
    "critic/explained_variance": "explained variance",
    "critic/value_loss": "value loss",
}


@runtime_checkable
class TextStream(Protocol):
    """What is asked of standard output."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


@dataclass
class StageState:
    """One running stage."""

    name: str
    total: float | None
    unit: str
    started: float
    done: float = 0
    reported_at: float | None = None


@dataclass
class Headline:
    """Where the whole run stands. `index` and `total` are 0 before the first iteration."""

    started: float
    index: int = 0
    total: int = 0
    phase: str = ""
    remaining_s: float | None = None
    remaining_at: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def position(self) -> str:
        phase = f" ({self.phase})" if self.phase else ""
        return f"iteration {self.index}/{self.total}{phase}"

    def left(self, now: float) -> float | None:
        if self.remaining_s is None:
            return None
        return max(0.0, self.remaining_s - (now - self.remaining_at))


def format_seconds(seconds: float) -> str:
    """`0:07`, `12:34`, `3:05:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def describe_count(state: StageState) -> str:
    of = f"/{state.total:g}" if state.total is not None else ""
    return f"{state.done:g}{of} {state.unit}"


def describe_speed(state: StageState, now: float) -> str:
    """Mean speed since the stage began, and what is left at that speed."""
    elapsed = now - state.started
    if state.done <= 0 or elapsed <= 0:
        return ""
    speed = state.done / elapsed
    text = f"{speed:.3g}/s" if speed < 100 else f"{speed:.0f}/s"
    if state.total is not None and state.done < state.total:
        text += f", {format_seconds((state.total - state.done) / speed)} left"
    return text


def describe_stage(state: StageState, now: float) -> str:
    parts = [describe_count(state), f"{now - state.started:.1f} s", describe_speed(state, now)]
    return f"{state.name}: " + ", ".join(part for part in parts if part)


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """Known keys under their short names; all given keys when none is known."""
    known = {short: metrics[key] for key, short in _SHORT_NAMES.items() if key in metrics}
    return "  ".join(f"{name} {value:.4g}" for name, value in (known or metrics).items())


class PlainDisplay:
    """A line for each finished iteration, and for a stage that runs longer than the interval."""

    def __init__(self, stream: TextStream, clock: Callable[[], float], interval_s: float) -> None:
        self._stream = stream
        self._clock = clock
        self._interval_s = interval_s

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def advanced(self, state: StageState) -> None:
        now = self._clock()
        since = state.started if state.reported_at is None else state.reported_at
        if now - since >= self._interval_s:
            state.reported_at = now
            self.line(f"  {describe_stage(state, now)}")

    def iteration_finished(self, headline: Headline, seconds: Mapping[str, float]) -> None:
        parts = [headline.position(), describe_metrics(headline.metrics)]
        parts.append(", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
        left = headline.left(self._clock())
        if left is not None and headline.index < headline.total:
            parts.append(f"about {format_seconds(left)} left")
        self.line(" | ".join(part for part in parts if part))


class LiveDisplay:
    """Headline, a bar for each running stage, last metrics: redrawn in place."""

    def __init__(
        self,
        stream: TextStream,
        headline: Headline,
        stages: list[StageState],
        clock: Callable[[], float],
    ) -> None:
        self._headline = headline
        self._stages = stages
        self._clock = clock
        self._console = Console(file=cast(IO[str], stream), force_terminal=True, highlight=False)
        self._live: Live | None = None
        self._moved_handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self) -> None:
        own = self._console.file in (sys.stdout, sys.__stdout__)
        originals = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            redirect_stdout=own,
            redirect_stderr=own,
        )
        self._live.start()
        if own:
            self._move_log_handlers(originals)

    def stop(self) -> None:
        for handler, stream in self._moved_handlers:
            handler.setStream(stream)
        self._moved_handlers.clear()
        if self._live:
            self._live.stop()
            self._live = None

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    def advanced(self, state: StageState) -> None:
        pass  # the display's own thread redraws

    def iteration_finished(self, headline: Headline, seconds: Mapping[str, float]) -> None:
        pass

    def _render(self) -> RenderableType:
        now = self._clock()
        rows: list[RenderableType] = []
        headline = self._headline
        if headline.total:
            text = Text(headline.position(), style="bold")
            text.append(f"  {format_seconds(now - headline.started)} elapsed", style="dim")
            left = headline.left(now)
            if left is not None:
                text.append(f", about {format_seconds(left)} left", style="dim")
            rows.append(text)
        if self._stages:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True)
            grid.add_column(width=30)
            grid.add_column(no_wrap=True)
            grid.add_column(no_wrap=True, style="cyan")
            for depth, state in enumerate(list(self._stages)):
                bar = ProgressBar(
                    total=state.total, completed=state.done, pulse=state.total is None
                )
                name = "  " * depth + state.name
                grid.add_row(name, bar, describe_count(state), describe_speed(state, now))
            rows.append(grid)
        if headline.metrics:
            rows.append(Text(describe_metrics(headline.metrics), style="green"))
        return Group(*rows)

    def _move_log_handlers(self, originals: tuple[TextStream | None, ...]) -> None:
        """Log lines go above the display too, instead of tearing it."""
        for handler in _stream_handlers():
            if handler.stream in originals:
                self._moved_handlers.append((handler, handler.stream))
                handler.setStream(sys.stderr)


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    named = [logging.getLogger(name) for name in list(logging.Logger.manager.loggerDict)]
    for logger in [logging.getLogger(), *named]:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(
                handler, logging.FileHandler
            ):
                yield handler
