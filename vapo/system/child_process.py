"""Inside a process that runs a user's code: its memory, its channel, what its errors say."""

from __future__ import annotations

import fcntl
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

MEMORY_HEADROOM_BYTES = 2 * 1024**3
"""Such a process may use so much memory above what it has at the start; then it is a failure."""

HIGH_DESCRIPTOR = 900
"""The channel's number, or above it, if so many are allowed: what writes into 3 misses it."""

_PACKAGE = str(Path(__file__).parents[1])


def limit_memory() -> None:
    """Cap the address space (Linux; elsewhere only the time limit holds)."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    limit = pages * resource.getpagesize() + MEMORY_HEADROOM_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def channel_of(descriptor: int) -> Connection:
    """The socket under a high number, and not handed to the programs that the code starts."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    except OSError:  # fewer are allowed
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return Connection(moved)


def failure_of(error: BaseException) -> str:
    """`error: ValueError: what it says (file.py:12)`, on what a user's code raised."""
    return printable(f"error: {type(error).__name__}: {error!s:.200}{_where(error)}")


def print_error(error: BaseException) -> None:
    """The traceback from the user's own first line on; none where the error is ours."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.tb_next
    if frame is not None:
        traceback.print_exception(type(error), error, frame)


def _where(error: BaseException) -> str:
    """The line outside of this package at which the error was raised."""
    place, frame = "", error.__traceback__
    while frame is not None:  # no source is read: memory may be short
        name = frame.tb_frame.f_code.co_filename
        if not name.startswith(_PACKAGE):
            place = f" ({name.rpartition('/')[2]}:{frame.tb_lineno})"
        frame = frame.tb_next
    return place


def printable(text: str) -> str:
    """Lone surrogates replaced, so that logs and tables can encode the text."""
    return text.encode("utf-8", "replace").decode()
