"""What the trainer, a host and the processes that run a user's code have agreed on."""

from __future__ import annotations

import fcntl
import json
import math
import os
import struct
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vapo.errors.redactor import redacted
from vapo.system.shown_text import beginning, visible

CLOSE_TIMEOUT_S = 2.0
"""A process that is no longer needed has so long to close what it has before it is killed."""

MESSAGE = struct.Struct("!BQ")
"""An order to the host: what to do, and the process's number."""


class Order(IntEnum):
    """`OPEN` comes with the process's end of its socket; `END` leaves it time to close; a host that
    runs answers `PING` with the number that came with it."""

    OPEN = 1
    END = 2
    KILL = 3
    PING = 4


Answering = Callable[[Any], dict[str, Any]]
"""What one process does: of a question the fields of its answer, which JSON can have, or their one
field `failure`. It may raise, hang or crash, and may have `close()`."""


@dataclass(frozen=True, kw_only=True)
class UserCode(ABC):
    """A user's code: what a host imports, and what an answer of its processes has in it."""

    shows_errors: bool = False
    """Also print the traceback of what the code raises; somebody reads its output."""
    passed: tuple[str, ...] = ()
    """Variables with credentials that it gets."""
    hidden: tuple[tuple[str, str], ...] = ()
    """What its failures must not show, of what it is given: `vapo.errors.redactor.hide`."""
    max_answer_bytes: int = 2**16
    """A longer line is no answer."""
    num_calls: int = 1
    """How many questions a process answers at a time, each in a thread; more than 1 is for code
    that waits (`vapo.system.concurrent_answers`)."""
    call_timeout_s: float = math.inf
    """The time limit of one of several calls at a time."""
    is_shared: bool = True
    """Whether one host imports it for all its processes, which share what the import has opened."""

    @property
    @abstractmethod
    def what(self) -> str:
        """What it is, for messages."""

    @abstractmethod
    def imported(self) -> Callable[[], Answering]:
        """In the host: import it; each call of what is returned makes what one process does.

        Raises: UserError: it cannot be imported or used.
        """

    @abstractmethod
    def checked(self, question: Any, fields: dict[str, Any]) -> dict[str, Any] | None:
        """In the trainer: the fields of an answer as they are used; None if it is none to this
        question."""


def write_reply(descriptor: int, ticket: str, fields: dict[str, Any]) -> None:
    """Raises: OSError: nobody is there to read it."""
    line = memoryview(json.dumps({"ticket": ticket, **fields}).encode() + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


def read_reply(
    line: bytes, ticket: str, checked: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """The fields of the reply that one line of a channel is, or its `failure`.

    None where it does not have this ticket, or `checked` says that its fields are no answer.
    """
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict) or not ticket or reply.pop("ticket", None) != ticket:
        return None
    if set(reply) == {"failure"}:
        failure = reply["failure"]
        return {"failure": visible(redacted(failure))} if isinstance(failure, str) else None
    return checked(reply)


def reward_of(value: Any) -> float | None:
    """A reply's number as a reward; None where it is no number, or none that a reward can be."""
    if not isinstance(value, (int, float)):
        return None
    try:
        reward = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return None if reward_problem(reward) is not None else reward


MAX_REWARD = 1e12
"""The largest size of a reward. Losses and norms of gradients add up squares of rewards over all
tokens of a batch, and of their products with activations and weights, in float32, which ends at
3.4e38."""

MEMORY_HEADROOM_BYTES = 2 * 1024**3
"""Such a process may use so much memory above what it has at the start; then it is a failure."""

THREAD_BYTES = 8 * 1024**2
"""Of the address space a thread's stack takes so much, of which it uses little."""

HIGH_DESCRIPTOR = 900
"""The channel's number, or above it, if so many are allowed: what writes into 3 misses it."""

_PACKAGE = str(Path(__file__).parents[1])


def limit_memory(headroom_bytes: int = MEMORY_HEADROOM_BYTES) -> None:
    """Cap the address space (Linux; elsewhere only the time limit holds)."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    limit = pages * resource.getpagesize() + headroom_bytes
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
    'a reward is a number of at most 1e+12 in size, this is 1e+39'
    """
    if not math.isfinite(reward):
        return f"a reward is a finite number, this is {reward!r}"
    if abs(reward) > MAX_REWARD:
        return f"a reward is a number of at most {MAX_REWARD:g} in size, this is {reward!r}"
    return None


def failure_of(error: BaseException) -> str:
    """`error: ValueError: what it says (file.py:12)`, on what a user's code raised."""
    message = ""
    with suppress(BaseException):  # it is the user's code that says it
        message = beginning(str(error), 200)
    return visible(f"error: {type(error).__name__}: {message}{_where(error)}", keep="")


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
