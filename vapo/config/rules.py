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
    """A message that says what is wrong with a config, and the fix.

    The error names the place of whichever of its `keys` was written last. `at` gives these keys if
    the message does not name them, or names others in its fix.
    """

    message: str
    at: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The dotted keys that do not fit together: `at`, or else all keys in the message."""
        return self.at or tuple(_KEY.findall(self.message))


Problems = Iterator[Problem]
Rule = Callable[[Any], Problems]
"""A function that yields the problems of a config, which it looks for as they are asked for."""


def changed(config: Any, keys: Iterable[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield those of the keys that are not at their defaults, with the value and, as text, the
    default.
    """
    plain = type(config)()
    for key in keys:
        if (value := value_at(config, key)) != (default := value_at(plain, key)):
            yield key, value, written(default)


def without_effect(config: Any, keys: Iterable[str], why: str) -> Problems:
    """Yield a problem for each of the keys that is not at its default, as nothing reads it.

    `why` says why nothing reads them.
    """
    for key, _, default in changed(config, keys):
        yield Problem(f"{key} has no effect: {why}; set {key}={default}")


def value_at(config: Any, key: str) -> Any:
    """Return the value of a config at a dotted key."""
    return reduce(getattr, key.split("."), config)


def written(value: Any) -> str:
    """Return a value as the text that an override has: `null`, `true` or `false`, else `str`."""
    return "null" if value is None else str(value).lower() if value in (True, False) else str(value)


def bad_pattern(
    key: str, text: str, is_good: Callable[[Any], bool], why: str, package: Any = re
) -> Problems:
    """Yield a problem if a regular expression cannot be compiled or is not good.

    Args:
        is_good: judges the compiled pattern.
        why: what the message says of a pattern that is not good.
        package: the module that compiles it, `re` or `regex`.
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
