"""Keys that are set beside the config files, as `KEY=VALUE`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from vapo.config import limits
from vapo.config.layers import COMMAND_LINE, ROW, Layer, read_value
from vapo.config.options import Entry, Option, holds_text
from vapo.config.scalars import escape_missing, is_like_null, is_null, unquoted
from vapo.config.yaml_text import flow_text
from vapo.errors import UserError


def override_of(key: str, value: Any) -> str:
    """Return the override `KEY=VALUE` that sets a key; a text is quoted where it needs to be."""
    is_text = isinstance(value, str | list | Mapping)
    return f"{key}={flow_text(value) if is_text else json.dumps(value)}"


def read_overrides(
    texts: Sequence[str], entries: Mapping[str, Entry], *, folder: Path | None = None
) -> Layer:
    """Return one layer of all `dotted.key=value` texts, of which the last one for a key wins.

    `folder` is that of the grid file that has the texts; None: they are of the command line.
    Raises: UserError.
    """
    name = COMMAND_LINE if folder is None else ROW
    tree, sources = dict[str, Any](), dict[str, str]()
    for text in texts:
        key, equals, value_text = text.partition("=")
        key = key.strip()
        if not equals or not re.fullmatch(r"[^\s.=]+(\.[^\s.=]+)*", key):
            raise UserError(f"{name}: '{text}' is not of the form dotted.key=value")
        for earlier in [k for k in sources if k == key or k.startswith(f"{key}.")]:
            del sources[earlier]
        value = _value_of(value_text, key, entries, name, sources)
        for part in reversed(key.split(".")):
            value = {part: value}
        _put(tree, value)
    return Layer(name, tree, sources=sources, folder=str((folder or Path()).resolve()))


def _put(tree: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _put(tree[name], value)
        else:
            tree[name] = value


def _value_of(
    text: str, key: str, entries: Mapping[str, Entry], place: str, sources: dict[str, str]
) -> Any:
    try:
        if holds_text(key, entries):
            return _text_of(text, key, entries.get(key), place, sources)
        text = text.strip()
        return read_value(text, key, place, sources)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{place}: {key}: '{text}' is not valid YAML: {reason}") from None


def _text_of(
    text: str, key: str, entry: Entry | None, place: str, sources: dict[str, str]
) -> str | None:
    """Return the text behind `=`, without the quotes around all of it; None for an unquoted null.

    `sources` gets a text that looks like another language's null.
    """
    inside = unquoted(text)
    if inside is None:
        if is_null(text) and (text or (isinstance(entry, Option) and entry.nullable)):
            return None
        if is_like_null(text):
            sources[key] = text
        inside = text
    if (reason := limits.interpolation_excess(inside)) is not None:
        raise UserError(f"{place}: {key}: {reason}")
    literal: str = escape_missing(inside)
    return literal
