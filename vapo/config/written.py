"""A config as YAML text, as nested values, as dotted keys, and as a hash.

Whatever of a config is written, printed or recorded comes from here: `${oc.env:NAME}` unresolved,
and URIs without their credentials.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vapo.config.credentials import without_credentials
from vapo.config.environment_variables import (
    FIELD,
    MARK,
    MARKED,
    REFERENCE,
    EnvironmentValue,
    FromEnvironment,
    Place,
    escape,
    values_of,
)
from vapo.config.kinds import is_function_folder
from vapo.config.scalars import escape_missing
from vapo.config.sources import values_hash
from vapo.config.yaml_text import yaml_text

Scalar = str | int | float | bool | None

_URI_INSIDE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"{}]+")


def written_tree(config: Any) -> dict[str, Any]:
    """Return the values of a config as they may be written or shown, as nested dicts.

    `${oc.env:NAME}` is unresolved, and URIs have no credentials.
    """
    return _view(config, lambda v: v.text, without_credentials)


def deciding_tree(config: Any) -> dict[str, Any]:
    """Return the resolved values from which a config's identity or hash is made, as nested dicts.

    URIs have no credentials. What a variable gives counts, as a seed or a folder does, unless the
    variable's name says that it is a secret. The folders in which a user's functions are looked for
    are left out: the run stays the same run when its files are moved.
    """
    tree = _view(
        config,
        lambda v: v.text if v.is_secret else _map(v.value, without_credentials),
        without_credentials,
    )
    return _without_folders(tree)


def _without_folders(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_folders(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if not is_function_folder(key)
    }


def is_from_environment(config: Any, key: str) -> bool:
    """Whether the value at a dotted key, or one below it, comes from the environment."""
    return bool(getattr(config, FIELD).under(key))


def _view(
    config: Any, shown_for: Callable[[EnvironmentValue], Any], literal: Callable[[str], str]
) -> dict[str, Any]:
    variables = getattr(config, FIELD, FromEnvironment()).values

    def walk(value: Any, path: Place) -> Any:
        variable = variables.get(path)
        if variable is not None and variable.value == value:
            return shown_for(variable)
        if isinstance(value, Mapping):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(item, (*path, index)) for index, item in enumerate(value)]
        return literal(value) if isinstance(value, str) else value

    return {key: walk(value, (key,)) for key, value in values_of(config).items()}


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def written_source(tree: Any) -> Any:
    """Return a tree with interpolations as the user wrote them, and URIs without credentials."""
    return _map(tree, _source_without_credentials)


def _source_without_credentials(text: str) -> str:
    """Return a text without the credentials of its URIs.

    An interpolation in a URI stays, because it shows nothing.
    """
    hidden: list[str] = []

    def hide(match: re.Match[str]) -> str:
        bare = _URI_INSIDE.sub(
            lambda uri: without_credentials(uri[0], reference=REFERENCE), match[0]
        )
        hidden.append(bare)
        return MARK.format(len(hidden) - 1)

    marked, num_replaced = text, 1
    while num_replaced:  # the innermost first
        marked, num_replaced = re.subn(r"\$\{[^${}]*\}", hide, marked)
    marked = without_credentials(marked, reference=REFERENCE)
    while MARKED.search(marked):
        marked = MARKED.sub(lambda match: hidden[int(match[1])], marked)
    return marked


def to_yaml(config: Any) -> str:
    """Return YAML that loads back to the same config, or to the same `Composed.tree`.

    `${oc.env:NAME}` stays unresolved, and URIs lose their credentials.
    """
    if isinstance(config, Mapping):
        tree = written_source(config)
    else:
        tree = _view(config, lambda v: v.source, _literal)
    return yaml_text(tree)


def _literal(text: str) -> str:
    literal: str = escape_missing(escape(without_credentials(text)))
    return literal


def flatten(config: Any) -> dict[str, Scalar]:
    """Return the resolved values of a config or a block by dotted key; lists become JSON text.

    They may hold secrets: what is written or shown comes from `flatten_written`.
    """
    return flatten_tree(values_of(config))


def flatten_written(config: Any) -> dict[str, Scalar]:
    """Return the values of a config by dotted key, as they may be written or shown.

    `${oc.env:NAME}` is unresolved, URIs have no credentials, and lists are JSON text.
    """
    return flatten_tree(written_tree(config))


def flatten_deciding(config: Any) -> dict[str, Scalar]:
    """Return by dotted key the values that decide what a run is, without credentials.

    Lists are JSON text.
    """
    return flatten_tree(deciding_tree(config))


def flatten_tree(tree: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the values of nested mappings by dotted key; lists become JSON text."""
    return {
        key: json.dumps(value) if isinstance(value, (Mapping, list, tuple)) else value
        for key, value in leaves(tree)
    }


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each value; an empty mapping counts as one."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in nested values, and the dotted key where it stands.

    The names of keys are texts, too.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield key, str(name)
            yield from texts_of(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_of(item, key)
    elif isinstance(value, str):
        yield key, value


def config_hash(config: Any) -> str:
    """Return 12 hex digits, equal for two configs whose resolved values are equal.

    Credentials do not count.
    """
    return values_hash(deciding_tree(config))
