"""Make text safe to show: no character has an effect of its own. Imports no transformers."""

from __future__ import annotations

import re
import unicodedata

_MAX_MARKS = 3
_CONTROLS = {"\n": "\u21b5\n", "\t": "\u21e5", "\x7f": "\u2421"}


def visible_text(text: str) -> str:
    """Replace controls, invisible and direction-changing characters by visible names.

    >>> visible_text("a\\tb\\u202e  ")
    'a\\u21e5b\\u27e8U+202E\\u27e9\\u2423\\u2423'
    """
    text = re.sub(r" {2,}| $|^ $", lambda spaces: "\u2423" * len(spaces[0]), text)
    parts: list[str] = []
    marks = 0
    for place, c in enumerate(text):
        is_mark = unicodedata.category(c) in ("Mn", "Me")
        marks = marks + 1 if is_mark else 0
        if is_mark and marks <= _MAX_MARKS:
            parts.append(c if place else f"\u25cc{c}")
        else:
            parts.append(_code_point(c) if is_mark else _visible_character(c))
    return "".join(parts)


def _visible_character(c: str) -> str:
    if c in _CONTROLS:
        return _CONTROLS[c]
    if c < " ":
        return chr(0x2400 + ord(c))
    if "\udc80" <= c <= "\udcff":  # a byte that is not a character: surrogateescape
        return f"\u27e8{ord(c) - 0xDC00:02X}\u27e9"
    is_plain = c == " " or c.isprintable()  # not: Cc, Cf, Cs, Co, Cn, Zl, Zp, Zs
    return c if is_plain else _code_point(c)


def _code_point(c: str) -> str:
    return f"\u27e8U+{ord(c):04X}\u27e9"
