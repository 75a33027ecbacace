"""What the trainer and the processes of environments have agreed on."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

MAX_OBSERVATION_CHARS = 2**18
"""A longer observation is a failure of its episode: it is no text for a policy to read."""

CLOSE_TIMEOUT_S = 2.0
"""An ended episode's `close()` has so long before its process is killed."""

MESSAGE = struct.Struct("!BQ")
"""An order to the host: what to do, and the episode's number."""


class Order(IntEnum):
    """`OPEN` comes with the episode's end of its socket; `END` leaves it time to close; a host that
    runs answers `PING` with the number that came with it."""

    OPEN = 1
    END = 2
    KILL = 3
    PING = 4


@dataclass(frozen=True)
class HostSettings:
    """What a host needs to make episodes."""

    kind: str
    name: str
    """The class, as `package.module:Class` or `folder/file.py:Class`; or an environment's id."""
    args: Mapping[str, Any] = field(default_factory=dict)
    function_folder: str | None = None
    function_bytes: bytes | None = None
    """A class of the trainer's own notebook or script (`vapo.system.handed_functions`)."""
    shows_errors: bool = False
    """Also print the traceback of what an environment raises; somebody reads its output."""
    passed: tuple[str, ...] = ()
    """Variables with credentials that the environment gets."""
    hidden: tuple[tuple[str, str], ...] = ()
    """What its failures must not show: `vapo.system.shown_text.hide`."""
    ticket: str = ""
    """Ticket of the reply that the host is ready, or why it is not."""


class Episode(Protocol):
    """An environment in one episode: a user's own object, or an adapter's. May have `close()`."""

    def reset(self, row: dict[str, Any]) -> str | None: ...

    def step(self, text: str) -> tuple[str | None, float]: ...


MakeEpisode = Callable[[], Episode]
