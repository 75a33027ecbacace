"""Keep texts as the user wrote them, and refuse values that YAML reads in an unexpected way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import yaml

from vapo.config.layers import Layer
from vapo.config.options import Entry, Option, holds_text
from vapo.config.scalars import is_like_null, other_number, with_sources
from vapo.errors import UserError


def as_spelled(
    layer: Layer, entries: Mapping[str, Entry], config_key: Callable[[str], str] = str
) -> Layer:
    """Return a copy of the layer in which each key of a text holds what the user wrote.

    So an unquoted `007` stays this text, although YAML reads a number.

    Args:
        config_key: returns the config's key that a key of the layer sets.

    Raises: UserError: a number that a reader takes for another than YAML does.
    """
    texts: dict[str, str] = {}
    for key, source in layer.sources.items():
        if holds_text(config_key(key), entries):
            texts[key] = source
        elif (kind := other_number(source)) is not None:
            raise UserError(
                f"{layer.place(key)}: {key}: YAML reads {source} as {kind}, "
                f"{yaml.safe_load(source)}: write the number that is meant in decimal digits, or "
                "quote a text"
            )
    return replace(layer, tree=with_sources(layer.tree, texts))


def null_excess(source: str | None, entry: Entry | None) -> str | None:
    """Return why an unquoted text, as `None`, is refused as another language's null, or None.

    Only a key that holds a text can have one.
    """
    if source is None or not is_like_null(source):
        return None
    if not isinstance(entry, Option) or entry.type is not str:
        return None
    null = "write null, or " if entry.nullable else ""
    return (
        f"{source} is not read as null here: {null}quote it if it is meant as text, as '{source}'"
    )
