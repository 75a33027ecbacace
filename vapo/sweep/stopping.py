"""How a sweep's runs are stopped: all are told at once, and a further signal kills what is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from vapo.errors import StopRequested
from vapo.system.process import ending_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_S = 15.0
"""Runs have so long to reach a safe point and to close what they record."""

_POLL_S = 0.05


class Stoppable(Protocol):
    """A started run."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def interrupt(self) -> None:
        """Ask it to stop, as Ctrl-C does; at once."""

    def kill(self) -> None:
        """End it with all that it has started."""


class SweepSignals:
    """The signals that end a sweep: the first one ends the work, and further ones are counted.

    So none is raised between the start of a run and the place where it is noted down, and none
    breaks off the stopping of the others.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._is_held = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A block in which this object takes the signals.

        Raises: KeyboardInterrupt, StopRequested: at the first signal.
        """
        with ending_signals(self._take, SIGNALS):
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """A part of the block that the first signal does not break off; it is raised at the end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._numbers:
            self._raise()

    def stop(self, runs: Sequence[Stoppable]) -> None:
        """Tell all runs to stop, then wait; after `STOP_S`, or at a further signal, kill them."""
        self._is_held = True
        for run in runs:
            run.interrupt()
        left, deadline = list(runs), time.monotonic() + STOP_S
        while left and time.monotonic() < deadline and len(self._numbers) < 2:
            time.sleep(_POLL_S)
            left = [run for run in left if run.poll() is None]
        for run in left:
            run.kill()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        if len(self._numbers) == 1 and not self._is_held:
            self._raise()

    def _raise(self) -> None:
        number = self._numbers[0]
        raise KeyboardInterrupt if number == signal.SIGINT else StopRequested(number)
