"""The protocol between the trainer, a host and the processes that run a user's code."""

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
from vapo.errors.shown_text import beginning, visible

CLOSE_TIMEOUT_S = 2.0
"""How long a process that is no longer needed may take to close before it is killed."""

MESSAGE = struct.Struct("!BQ")
"""An order to the host: its kind, and the number of the process that it concerns."""


class Order(IntEnum):
    """The kinds of orders to a host process.

    `OPEN` comes with the new process's end of its socket. `END` gives a process time to close,
    `KILL` does not. A host that works answers `PING` with the number that came with it.
    """

    OPEN = 1
    END = 2
    KILL = 3
    PING = 4


Answering = Callable[[Any], dict[str, Any]]
"""The function that a process runs: it takes a question and returns the fields of its answer, which
must fit into JSON, or the one field `failure`. It may raise, hang or crash, and may have `close()`.
"""


@dataclass(frozen=True, kw_only=True)
class UserCode(ABC):
    """A user's code for a host process: how to import it, and how to check its answers."""

    shows_errors: bool = False
    """Whether to print the traceback of what the code raises, because its output is shown."""
    passed: tuple[str, ...] = ()
    """The names of environment variables with credentials that the code gets nevertheless."""
    hidden: tuple[tuple[str, str], ...] = ()
    """The secrets that the code is given and its failures must not show: see
    `vapo.errors.redactor.hide`."""
    max_answer_bytes: int = 2**16
    """A longer line counts as garbled."""
    num_calls: int = 1
    """How many questions a process answers at a time, each in a thread; more than 1 is for code
    that waits (`vapo.user_code.concurrent_answers`)."""
    call_timeout_s: float = math.inf
    """The time limit of one call, in seconds, if a process answers several at a time."""
    is_shared: bool = True
    """Whether one host may import the code for all processes, which then share the files and
    connections that the import has opened."""

    @property
    @abstractmethod
    def what(self) -> str:
        """The name of the code in messages, such as `verifier score.py:score`."""

    @abstractmethod
    def imported(self) -> Callable[[], Answering]:
        """Import the code. This is called in the host process.

        Returns: a function that makes the `Answering` of one process.

        Raises: UserError: the code cannot be imported or used.
        """

    @abstractmethod
    def checked(self, question: Any, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Return an answer's fields for the trainer; None if they do not answer the question.

        This is called in the trainer, because the process that answers is not trusted.
        """


def write_reply(descriptor: int, ticket: str, fields: dict[str, Any]) -> None:
    """Write a reply, which is a ticket and fields, to a descriptor as one line of JSON.

    Raises: OSError: the other end is closed.
    """
    line = memoryview(json.dumps({"ticket": ticket, **fields}).encode() + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


def read_reply(
    line: bytes, ticket: str, checked: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """Return the fields of a reply that came as one line of a channel, or its one field `failure`.

    Secrets in a failure's text are hidden. The result is None if the line is not a reply with this
    ticket, or if `checked` rejects its fields.
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
    """Return a reply's value as a reward, or None if it is not a number that a reward can be."""
    if not isinstance(value, (int, float)):
        return None
    try:
        reward = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return None if reward_problem(reward) is not None else reward


MAX_REWARD = 1e12
"""The largest absolute value of a reward. Losses and norms of gradients add up squares of rewards
over all tokens of a batch, and of their products with activations and weights, in float32, whose
largest number is 3.4e38."""

MEMORY_HEADROOM_BYTES = 2 * 1024**3
"""How much more memory than at its start a process may use; with more its answer is a failure."""

THREAD_BYTES = 8 * 1024**2
"""How much address space the stack of a thread reserves, of which it uses little."""

HIGH_DESCRIPTOR = 900
"""The lowest number of the channel's descriptor, if so many are allowed. Code that writes into
descriptor 3 by mistake does not write into the channel."""

_PACKAGE = str(Path(__file__).parents[1])


def limit_memory(headroom_bytes: int = MEMORY_HEADROOM_BYTES) -> None:
    """Limit this process's address space to `headroom_bytes` above its present size, on Linux.

    A lower hard limit of the system stays. Core dumps are switched off, too. On other systems this
    does nothing.
    """
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
    """Make a connection of a socket's descriptor. No program that this process starts inherits it.

    The descriptor is moved to a number of at least `HIGH_DESCRIPTOR`, which no code writes to by
    mistake, or to any free one from 3 on if the system allows no such number.
    """
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    except OSError:  # fewer are allowed
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return Connection(moved)


def reward_problem(reward: float) -> str | None:
    """Return why a number cannot be a reward, or None if it can.

    >>> reward_problem(1e39)
    'a reward is a number of at most 1e+12 in size, this is 1e+39'
    """
    if not math.isfinite(reward):
        return f"a reward is a finite number, this is {reward!r}"
    if abs(reward) > MAX_REWARD:
        return f"a reward is a number of at most {MAX_REWARD:g} in size, this is {reward!r}"
    return None


def failure_of(error: BaseException) -> str:
    """Return a text on what a user's code raised: `error: ValueError: its message (file.py:12)`.

    A message of more than 200 characters is cut. The file and line are the innermost outside this
    package; they are missing if there are none.
    """
    message = ""
    with suppress(BaseException):  # it is the user's code that says it
        message = beginning(str(error), 200)
    return visible(f"error: {type(error).__name__}: {message}{_where(error)}", keep="")


def print_error(error: BaseException) -> None:
    """Print an error's traceback, from the first line outside this package on. Print nothing if
    there is no such line."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.tb_next
    if frame is not None:
        text = "".join(traceback.format_exception(type(error), error, frame))
        print(redacted(text), end="", file=sys.stderr)


def _where(error: BaseException) -> str:
    """Return ` (file.py:12)`, the innermost line of an error's traceback outside this package.

    The text is empty if there is no such line.
    """
    place, frame = "", error.__traceback__
    while frame is not None:  # no source is read: memory may be short
        name = frame.tb_frame.f_code.co_filename
        if not name.startswith(_PACKAGE):
            place = f" ({name.rpartition('/')[2]}:{frame.tb_lineno})"
        frame = frame.tb_next
    return place


def printable(text: str) -> str:
    """Return the text with `?` for lone surrogates, so that logs and tables can encode it."""
    return text.encode("utf-8", "replace").decode()
