"""What a rule between keys reports: a message that names the keys, and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

_KEY = re.compile(r"[a-z]\w*(?:\.\w+)+")
_MAX_SHOWN = 60


@dataclass(frozen=True)
class Problem:
    """What is wrong, and the fix. Whichever of its `keys` was written last is where it is.

    `at` says which they are where the message does not name them, or names others in its fix.
    """

    message: str
    at: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that do not fit together."""
        return self.at or tuple(_KEY.findall(self.message))


Problems = Iterator[Problem]
Rule = Callable[[Any], Problems]
"""Yields what is wrong with a config; it goes no further than it is read."""


def without_effect(config: Any, keys: Iterable[str], why: str) -> Problems:
    """Those of the keys that nothing reads, and that are not at their defaults."""
    plain = type(config)()
    for key in keys:
        if value_at(config, key) != (default := value_at(plain, key)):
            yield Problem(f"{key} has no effect: {why}; set {key}={written(default)}")


def value_at(config: Any, key: str) -> Any:
    """The value of a config at a dotted key."""
    return reduce(getattr, key.split("."), config)


def written(value: Any) -> str:
    """A value as an override has it."""
    return "null" if value is None else str(value).lower() if value in (True, False) else str(value)


def pattern_of(key: str, text: str, package: Any = re) -> Any | str:
    """The compiled pattern; or, as a text, what is wrong with it.

    Args:
        key: the dotted key that holds it.
        package: the one whose pattern it is, `re` or `regex`.
    """
    try:
        return package.compile(text)
    except (package.error, OverflowError) as error:
        reason = str(error)
    except RecursionError:
        reason = "its groups are nested too deeply"
    return f"{key} {shown_pattern(text)} is not a regular expression: {reason}"


def shown_pattern(text: str) -> str:
    """The pattern as a message quotes it, the beginning of a long one."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
