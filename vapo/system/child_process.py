"""Inside a process that runs a user's code: its memory, its channel, what its errors say."""

from __future__ import annotations

import fcntl
import math
import os
import struct
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from vapo.system.shown_text import beginning, redacted, visible

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


def reward_problem(reward: float) -> str | None:
    """Why a number cannot be a reward, as the end of a sentence; None if it can.

    >>> reward_problem(1e39)
    'a reward is a number of at most 3.4e38, which float32 holds, this is 1e+39'
    """
    if not math.isfinite(reward):
        return f"a reward is a finite number, this is {reward!r}"
    if not fits_float32(reward):
        return f"a reward is a number of at most 3.4e38, which float32 holds, this is {reward!r}"
    return None


def fits_float32(number: float) -> bool:
    """Whether the trainer's tensors can hold a finite number."""
    try:
        struct.pack("<f", number)  # the native "f" makes it infinite
    except OverflowError:
        return False
    return True


def failure_of(error: BaseException) -> str:
    """`error: ValueError: what it says (file.py:12)`, on what a user's code raised."""
    said = beginning(str(error), 200)
    return visible(f"error: {type(error).__name__}: {said}{_where(error)}", keep="")


def print_error(error: BaseException) -> None:
    """The traceback from the user's own first line on; none where the error is ours."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.tb_next
    if frame is not None:
        text = "".join(traceback.format_exception(type(error), error, frame))
        print(redacted(text), end="", file=sys.stderr)


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
