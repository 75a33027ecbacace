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


def changed(config: Any, keys: Iterable[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield the keys that are not at their defaults, with value and default as written."""
    plain = type(config)()
    for key in keys:
        if (value := value_at(config, key)) != (default := value_at(plain, key)):
            yield key, value, written(default)


def without_effect(config: Any, keys: Iterable[str], why: str) -> Problems:
    """Report those of the keys that are not at their defaults, although nothing reads them."""
    for key, _, default in changed(config, keys):
        yield Problem(f"{key} has no effect: {why}; set {key}={default}")


def value_at(config: Any, key: str) -> Any:
    """Return the value of a config at a dotted key."""
    return reduce(getattr, key.split("."), config)


def written(value: Any) -> str:
    """Return a value as an override has it."""
    return "null" if value is None else str(value).lower() if value in (True, False) else str(value)


def bad_pattern(
    key: str, text: str, is_good: Callable[[Any], bool], why: str, package: Any = re
) -> Problems:
    """Report a regular expression that cannot be compiled, or that is not good when it is.

    Args:
        why: it is not, as the message says it after key and pattern.
        package: the one whose pattern it is, `re` or `regex`.
    """
    try:
        reason = "" if is_good(package.compile(text)) else why
    except (package.error, OverflowError) as error:
        reason = f"is not a regular expression: {error}"
    except RecursionError:
        reason = "is not a regular expression: its groups are nested too deeply"
    if reason:
        quoted = repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
        yield Problem(f"{key} {quoted} {reason}", (key,))
