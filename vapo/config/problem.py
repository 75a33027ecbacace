"""What a rule between keys reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """The keys that do not fit together, and the message with the fix."""

    keys: tuple[str, ...]
    message: str


Rule = Callable[[Any], Problem | None]
