"""What the trainer, a host and the processes that run a user's code have agreed on.

The trainer asks in pickles, which only our own process reads. An answer is one line of JSON with
the question's own ticket, not a pickle: nothing that a response can make of such a process is
executed in the trainer, and what the user's code itself writes into the channel is no answer.
"""

from __future__ import annotations

import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from vapo.system.child_process import reward_problem
from vapo.system.shown_text import redacted, visible

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
    """What its failures must not show: `vapo.system.shown_text.hide`."""
    max_answer_bytes: int = 2**16
    """A longer line is no answer."""
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
        said = reply["failure"]
        return {"failure": visible(redacted(said))} if isinstance(said, str) else None
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
