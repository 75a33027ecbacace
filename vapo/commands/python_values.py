"""Overrides given from Python: values as they are, and functions themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from vapo.errors import UserError
from vapo.system.user_functions import function_path

Overrides = Sequence[str] | Mapping[str, Any]


def as_overrides(overrides: Overrides) -> list[str]:
    """`KEY=VALUE` texts, from such texts or from a mapping of dotted keys to values.

    Raises:
        UserError: a value of a type that no config has; names its key.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides: give a list of 'key=value' or a mapping, not {overrides!r}")
    if isinstance(overrides, Mapping):
        plain = {key: _plain(key, value) for key, value in overrides.items()}
        return [
            f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for key, value in plain.items()
        ]
    return list(overrides)


def _plain(key: str, value: Any) -> Any:
    """The value in the types of YAML; paths and functions as text, numbers of numpy and torch as
    Python's."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        if not key.endswith("function"):
            raise UserError(f"{key}: a function is no value of this key")
        return function_path(value, key=key)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(key, item) for item in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(key, value.item())
    raise UserError(
        f"{key}: {type(value).__name__} is no type of a config: give a number, text, true or "
        "false, a list or a mapping"
    )
