"""The current process of a run: whether it reports for the run, what ends it, and its seeds."""

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
from typing import TYPE_CHECKING, Any

from vapo.errors import StopRequested

if TYPE_CHECKING:
    import psutil

STARTER = "VAPO_STARTED_BY"
"""The environment variable with the id of the process that started this one; see
`stop_with_starter`."""

_POLL_S = 0.5


def kill_started_by(process: psutil.Process) -> None:
    """Kill all descendants of a process, which it or its descendants started."""
    from psutil import NoSuchProcess

    for child in process.children(recursive=True):
        with suppress(NoSuchProcess):  # it has ended
            child.kill()


def stop_with_starter() -> None:
    """Send this process SIGTERM once its starter, by the variable `STARTER`, has ended.

    A starter that was killed could not stop it itself. Without the variable nothing happens. The
    variable is removed from the environment, so that the processes which this one starts, and stops
    itself, do not react to it.
    """
    starter = os.environ.pop(STARTER, None)
    if starter is not None:
        threading.Thread(target=_stop_after, args=(int(starter),), daemon=True).start()


def _stop_after(starter: int) -> None:
    """Wait until the process with this id has ended, then send this process SIGTERM."""
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
    with suppress(OSError):  # the terminal may have gone, too
        os.write(2, text.encode())
    os.kill(os.getpid(), signal.SIGTERM)


def is_main_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is global rank 0, which reports for the run. Known before any set-up.

    The global rank comes from the launcher's `RANK` or `SLURM_PROCID`. Without these it is the
    first process of the first host, by `NODE_RANK` and `LOCAL_RANK`.
    """
    for name in ("RANK", "SLURM_PROCID"):
        if environ.get(name):
            return environ[name] == "0"
    return all(environ.get(name) in (None, "", "0") for name in ("NODE_RANK", "LOCAL_RANK"))


def is_under_nohup(number: signal.Signals) -> bool:
    """Whether the signal is SIGHUP and ignored: this process shall outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def ending_signals(
    call: Callable[[int, FrameType | None], Any],
    numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGHUP),
) -> Iterator[None]:
    """Call `call` for these signals in the block. Outside of the main thread this does nothing.

    SIGHUP is left alone if the process shall outlive its terminal.
    """
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
    """Handle a signal by raising an exception that ends the command, so that its records are
    closed.

    A second signal of the same number ends the process at once.

    Raises: StopRequested: always.
    """
    signal.signal(number, signal.SIG_DFL)
    raise StopRequested(number)


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on its parts alone, as the run's seed and a purpose."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
