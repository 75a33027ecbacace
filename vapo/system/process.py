"""One of the processes of a run: whether it reports for it, what ends it, what it draws."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from vapo.errors import StopRequested

STARTER = "VAPO_STARTED_BY"
"""The variable that names the process, by its number, without which this one has no purpose."""

_POLL_S = 0.5


def stop_with_starter() -> None:
    """From now on, ask this process to stop (SIGTERM) once the one that started it has ended.

    That may have been killed, and then it stops nobody. A process that is started from here is not
    asked as well: this one stops it.
    """
    starter = os.environ.pop(STARTER, None)
    if starter is not None:
        threading.Thread(target=_stop_after, args=(int(starter),), daemon=True).start()


def _stop_after(starter: int) -> None:
    try:
        process_descriptor = os.pidfd_open(starter)  # readable once it has ended
    except ProcessLookupError:
        pass
    except (OSError, AttributeError):  # this system has no such descriptors
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(_POLL_S)
    else:
        select.select([process_descriptor], [], [])
    text = "vapo: the process that started this one has ended; stopping\n"
    with suppress(OSError):  # of the terminal's, which went with it
        os.write(2, text.encode())
    os.kill(os.getpid(), signal.SIGTERM)


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
    previous_handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if not is_under_nohup(number):
                previous_handlers[number] = signal.signal(number, call)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
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
