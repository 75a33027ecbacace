"""A config as YAML text, as dotted keys with scalar values, and as a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vapo.config import environment_variables
from vapo.config.written import deciding_tree, source_tree, written_source, written_tree

Scalar = str | int | float | bool | None


def to_yaml(config: Any) -> str:
    """YAML that loads back to the same config: of a dataclass, or of `Composed.tree` as written.

    `${oc.env:NAME}` stays unresolved, and URIs lose their credentials: see `written`.
    """
    if isinstance(config, DictConfig):
        tree = written_source(OmegaConf.to_container(config, resolve=False))
        return OmegaConf.to_yaml(OmegaConf.create(tree))
    return OmegaConf.to_yaml(OmegaConf.create(source_tree(config)))


def flatten(config: Any) -> dict[str, Scalar]:
    """Dotted key -> scalar, of a config or a block of one; lists become JSON text.

    For use: what is written or shown comes from `flatten_written`.
    """
    return flatten_tree(environment_variables.values_of(config))


def flatten_written(config: Any) -> dict[str, Scalar]:
    """As `flatten`, as it may be written: `${oc.env:NAME}` unresolved, URIs bare."""
    return flatten_tree(written_tree(config))


def flatten_deciding(config: Any) -> dict[str, Scalar]:
    """As `flatten`, of what decides a run and not of the credentials that it uses."""
    return flatten_tree(deciding_tree(config))


def flatten_tree(tree: Mapping[str, Any]) -> dict[str, Scalar]:
    """As `flatten`, of nested mappings."""
    return dict(_flatten(tree, ""))


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Scalar]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, (Mapping, list, tuple)):
            yield f"{prefix}{name}", json.dumps(value)
        else:
            yield f"{prefix}{name}", value


def config_hash(config: Any) -> str:
    """12 hex digits that are equal exactly when the resolved values are, credentials aside."""
    canonical = json.dumps(deciding_tree(config), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
