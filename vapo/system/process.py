"""One of the processes of a run: whether it reports for it, what ends it, what it draws."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vapo.errors import StopRequested


def is_main_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process reports for the run: global rank 0, known before any set-up.

    Launchers that set a global rank (`RANK`, `SLURM_PROCID`) are believed; otherwise the first
    process of the first host is meant (`NODE_RANK`, `LOCAL_RANK`).
    """
    for name in ("RANK", "SLURM_PROCID"):
        if environ.get(name):
            return environ[name] == "0"
    return all(environ.get(name) in (None, "", "0") for name in ("NODE_RANK", "LOCAL_RANK"))


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


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the run's seed and the purpose of the draw; stable across processes."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
