"""Regular expressions that a config gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import regex

_MAX_SHOWN = 60


def pattern_of(key: str, text: str, make: Callable[[str], Any] = re.compile) -> Any | str:
    """The compiled pattern; or, as a text, what is wrong with it.

    Args:
        key: the dotted key that holds it.
        make: `regex.compile`, where the pattern is for that package.
    """
    try:
        return make(text)
    except (re.error, regex.error, OverflowError) as error:
        reason = str(error)
    except RecursionError:
        reason = "its groups are nested too deeply"
    return f"{key} {shown_pattern(text)} is not a regular expression: {reason}"


def shown_pattern(text: str) -> str:
    """The pattern as a message quotes it, the beginning of a long one."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
