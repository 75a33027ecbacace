"""How progress looks: lines, and on a terminal a block below them that is redrawn in place."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from vapo.system.shown_text import TextStream, say, visible

_SHORT_NAMES = {
    "eval/avg_at_k": "avg@k",
    "rollout/reward_mean": "reward",
    "rollout/accuracy": "accuracy",
    "rollout/response_length_mean": "length",
    "actor/entropy": "entropy",
    "critic/explained_variance": "explained variance",
    "critic/value_loss": "value loss",
}


def can_redraw(stream: TextStream) -> bool:
    """Whether what is shown there can be drawn anew in its place: a terminal that knows how."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


@dataclass
class StageState:
    """One running stage."""

    name: str
    total: float | None
    unit: str
    started: float
    done: float = 0


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
    """Known keys under their short names; all given keys when none is known.

    A figure that an iteration does not have, as the explained variance of equal returns, is n/a.
    """
    known = {short: metrics[key] for key, short in _SHORT_NAMES.items() if key in metrics}
    shown = known or metrics
    figures = {n: "n/a" if math.isnan(value) else f"{value:.4g}" for n, value in shown.items()}
    return "  ".join(f"{name} {figure}" for name, figure in figures.items())


def stage_bars(stages: Sequence[StageState], now: float) -> Table:
    """A bar with count and speed for each running stage, the inner ones indented."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(width=30)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, style="cyan")
    for depth, state in enumerate(stages):
        bar = ProgressBar(total=state.total, completed=state.done, pulse=state.total is None)
        name = "  " * depth + state.name
        grid.add_row(name, bar, describe_count(state), describe_speed(state, now))
    return grid


class Display:
    """Writes lines to a stream; what `render` returns, if given, stays below them on a terminal."""

    def __init__(self, stream: TextStream, render: Callable[[], RenderableType] | None) -> None:
        self._stream, self._render = stream, render
        self._console = Console(file=cast(IO[str], stream), force_terminal=True, highlight=False)
        self._until_stopped = ExitStack()

    def start(self) -> None:
        if self._render is None:
            return
        own = self._console.file in (sys.stdout, sys.__stdout__)
        originals = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            redirect_stdout=own,
            redirect_stderr=own,
        )
        self._until_stopped.enter_context(live)
        if not own:
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
            self._console.print(visible(text), markup=False)
