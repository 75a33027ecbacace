"""Stop a sweep's runs: a first signal asks all of them to stop, a second one kills the rest."""

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
"""Seconds in which runs can reach a safe point and close their records."""

_POLL_S = 0.05


class Stoppable(Protocol):
    """A handle of a run that was started, as a process or as a job."""

    def poll(self) -> int | None:
        """Return the run's exit code, or None while it runs."""

    def interrupt(self) -> None:
        """Ask the run to stop, as Ctrl-C does, without waiting for it."""

    def kill(self) -> None:
        """End the run by force, with all processes that it has started."""


class SweepSignals:
    """Handles the signals that end a sweep. The first one raises an exception, others are counted.

    A signal that comes while a run is started is deferred until the run is in the list of running
    ones. No signal interrupts the stopping of the runs.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._is_deferred = False

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Handle the signals in this block.

        Raises: KeyboardInterrupt or StopRequested at the first signal.
        """
        with ending_signals(self._take, SIGNALS):
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer a signal that comes in this block to its end.

        The block stands inside `catching`.
        """
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._numbers:
            self._raise()

    def stop(self, runs: Sequence[Stoppable]) -> None:
        """Ask all runs to stop, and wait.

        After `STOP_S` seconds or a second signal, kill the rest.
        """
        self._is_deferred = True
        for run in runs:
            run.interrupt()
        running, deadline = list(runs), time.monotonic() + STOP_S
        while running and time.monotonic() < deadline and len(self._numbers) < 2:
            time.sleep(_POLL_S)
            running = [run for run in running if run.poll() is None]
        for run in running:
            run.kill()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        if len(self._numbers) == 1 and not self._is_deferred:
            self._raise()

    def _raise(self) -> None:
        number = self._numbers[0]
        raise KeyboardInterrupt if number == signal.SIGINT else StopRequested(number)
