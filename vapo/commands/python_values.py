"""Overrides that a Python program gives as values and functions, not as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vapo.config import FitConfig
from vapo.config.limits import MAX_CONFIG_DEPTH
from vapo.config.options import describe, holds_text
from vapo.config.overrides import override_of
from vapo.config.scalars import escape_missing
from vapo.errors import UserError, check_utf8
from vapo.user_code.handed_functions import function_path

Overrides = Sequence[str] | Mapping[str, Any]


def as_overrides(overrides: Overrides) -> list[str]:
    """Return `KEY=VALUE` texts, from such texts or from a mapping of dotted keys to values.

    A text in a mapping is the value itself, unless the key is known and does not hold a text. Then
    the text is read as YAML.

    Raises:
        UserError: no config has a value of this type. The message names its key.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides: give a list of 'key=value' or a mapping, not {overrides!r}")
    if isinstance(overrides, Mapping):
        return [_override(str(key), value) for key, value in overrides.items()]
    return list(overrides)


def _override(key: str, value: Any) -> str:
    if "=" in key:
        raise UserError(
            f"overrides: the key {key!r} contains '=': override the block around it, with a "
            "mapping as its value"
        )
    entries, plain = describe(FitConfig), _plain(key, value)
    if holds_text(key, entries):
        return override_of(key, plain)
    if isinstance(plain, str) and key in entries:
        return f"{key}={plain}"
    return override_of(key, escape_missing(plain))


def _plain(key: str, value: Any, depth: int = 0) -> Any:
    """Return a value in a type of YAML.

    Paths and functions become texts. Numbers of numpy and torch become Python's.

    Raises: UserError: no config can hold the value; names `key`.
    """
    if depth > MAX_CONFIG_DEPTH:
        raise UserError(f"{key}: nested deeper than {MAX_CONFIG_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):
        check_utf8(value, key)
        return str.__str__(value)  # a plain text, also for a subclass such as an enum
    if callable(value):
        if not key.endswith("function"):
            raise UserError(
                f"{key}: this key does not take a function: give a number, text, true or false, a "
                "list or a mapping"
            )
        return function_path(value, key=key)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        for name in value:
            check_utf8(str(name), key)
        return {str(name): _plain(f"{key}.{name}", item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(key, item, depth + 1) for item in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(key, value.item())
    raise UserError(
        f"{key}: a config cannot hold a value of type {type(value).__name__}: give a number, text, "
        "true or false, a list or a mapping"
    )
