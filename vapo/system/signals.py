"""Signals that end a command or a run, as SIGTERM, and SIGHUP, which a closed terminal sends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vapo.errors import StopRequested


def is_under_nohup(number: signal.Signals) -> bool:
    """Whether whoever started this process wants it to outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def ending_signals(
    call: Callable[[int, FrameType | None], Any],
    numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGHUP),
) -> Iterator[None]:
    """A block in which they call this. Outside of the main thread it does nothing."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if not is_under_nohup(number):
                before[number] = signal.signal(number, call)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_in_good_order(number: int, frame: FrameType | None) -> None:
    """End the command as an error would, so that what it records is closed; again: at once.

    Raises: StopRequested
    """
    signal.signal(number, signal.SIG_DFL)
    raise StopRequested(number)
