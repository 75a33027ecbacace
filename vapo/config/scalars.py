"""How single values of YAML are read: none silently becomes another text than was written.

YAML turns unquoted `007`, `1:30` and `2024_11_27` into the numbers 7, 90 and 20241127. For a key
that holds a text, what was written is the text; for one that holds a number, these are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import yaml
from omegaconf import MISSING

_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"\\]|\\[\s\S])*\"")
_NULLS = ("", "~", "null", "Null", "NULL")
_LIKE_NULL = ("none", "nil")
_MISSING = re.compile(rf"(\\*){re.escape(MISSING)}")
_OTHER_NUMBERS = {
    re.compile(r"[-+]?0[0-7_]+"): "an octal number",
    re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"): "a number of base 60",
    re.compile(r"(?=.*_)[-+.]?[0-9][\w.+-]*"): "a number with underscores",
}


def is_null(text: str) -> bool:
    """Whether YAML reads the unquoted text as null."""
    return text in _NULLS


def is_like_null(text: str) -> bool:
    """Whether the text is another language's null, as `None`, which YAML reads as text."""
    return text.lower() in _LIKE_NULL


def other_number(source: str) -> str | None:
    """Return what YAML takes an unquoted number for, if most readers would take it for another.

    >>> other_number("010"), other_number("1:30"), other_number("1_000"), other_number("10")
    ('an octal number', 'a number of base 60', 'a number with underscores', None)
    """
    return next((kind for form, kind in _OTHER_NUMBERS.items() if form.fullmatch(source)), None)


def unquoted(text: str) -> str | None:
    r"""Return the text inside the quotes of a text that is quoted as a whole, or None.

    Between single quotes `''` is a quote; between double ones a backslash escapes, as in YAML.
    Line ends in the quotes are kept.

    >>> unquoted("'it''s '"), unquoted(r'"a\n"'), unquoted('"a" or "b"')
    ("it's ", 'a\n', None)

    Raises: yaml.YAMLError: an escape that YAML does not know.
    """
    if not _QUOTED.fullmatch(text):
        return None
    if text[0] == "'":
        return text[1:-1].replace("''", "'")
    flow_text = re.sub(r"\\[\s\S]|[^\\]", lambda piece: _printable(piece[0]), text)
    value: str = yaml.safe_load(flow_text)
    return value


def _printable(piece: str) -> str:
    """Return a character as it is, or as an escape if it is not printable; an escape stays."""
    return piece if len(piece) == 2 or piece.isprintable() else f"\\U{ord(piece):08x}"


def as_in_source(node: yaml.Node | None, value: Any, prefix: str, sources: dict[str, str]) -> Any:
    """Return the value of a YAML node, with the names of its keys as they are written.

    Args:
        value: what YAML read the node as.
        prefix: the node's dotted key.
        sources: gets, by dotted key, the source of each unquoted scalar that YAML does not
            read as text, or that looks like null and is a text.
    """
    if isinstance(node, yaml.ScalarNode):
        if _is_like_missing(value):
            return node.value  # escapes are taken away when the whole config is resolved
        is_plain = node.style is None
        if is_plain and (isinstance(value, bool | int | float) or is_like_null(node.value)):
            sources[prefix] = node.value
    elif isinstance(node, yaml.SequenceNode) and isinstance(value, list):
        items = zip(node.value, value, strict=True)
        return [
            as_in_source(item, read_as, _joined(prefix, index), sources)
            for index, (item, read_as) in enumerate(items)
        ]
    elif isinstance(node, yaml.MappingNode) and isinstance(value, Mapping):
        # `<<` becomes the keys that it stands for
        yaml.constructor.SafeConstructor().flatten_mapping(node)
        block: dict[str, Any] = {}
        for key_node, item in node.value:
            name = key_node.value
            read_as = value[_key_in(value, name)]
            block[name] = as_in_source(item, read_as, _joined(prefix, name), sources)
        return block
    return value


def _key_in(block: Mapping[Any, Any], name: str) -> Any:
    """Return the key of a block that YAML read for a name in the source, as 1 for `1`."""
    if name in block:
        return name
    with suppress(ValueError):  # OmegaConf's floats are more than YAML's
        if (number := float(name)) in block:
            return number
    if (value := yaml.safe_load(name)) in block:
        return value
    raise ValueError(f"the name '{name}' cannot be read")


def _joined(prefix: str, name: str | int) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def _each(value: Any, change: Callable[[Any, str], Any], key: str = "") -> Any:
    """Return nested values with each value replaced by `change(value, dotted_key)`."""
    if isinstance(value, Mapping):
        return {name: _each(item, change, _joined(key, name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_each(item, change, _joined(key, index)) for index, item in enumerate(value)]
    return change(value, key)


def with_sources(value: Any, sources: Mapping[str, str]) -> Any:
    """Return nested values in which a text of `sources` replaces the value at its dotted key."""
    return _each(value, lambda item, key: sources.get(key, item))


def is_missing(value: Any) -> bool:
    """Whether a value is `???`, which stands for a value that must still be set."""
    return isinstance(value, str) and value == MISSING


def escape_missing(value: Any) -> Any:
    r"""Escape texts that look like `???`, which would stand for a value that must be set.

    >>> escape_missing(["???", "a???"])
    ['\\???', 'a???']
    """
    return _each(value, lambda item, _: f"\\{item}" if _is_like_missing(item) else item)


def unescape_missing(value: Any) -> Any:
    """Remove the backslash that `escape_missing` puts before texts that look like `???`."""
    return _each(value, lambda item, _: item.removeprefix("\\") if _is_like_missing(item) else item)


def _is_like_missing(value: Any) -> bool:
    """Whether a value is `???` with any number of backslashes before it."""
    return isinstance(value, str) and _MISSING.fullmatch(value) is not None
