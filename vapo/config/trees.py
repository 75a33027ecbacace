"""The tree of a config: nested mappings, from merged layers to the blocks of the schema.

Interpolations stay in it as they are written until `resolved` follows them, by OmegaConf.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vapo.config.kinds import hints_of, is_union, kinds_of, own_type, split_null, types_in
from vapo.config.layers import is_interpolation, is_of_type
from vapo.config.scalars import is_missing, unescape_missing

Tree = dict[str, Any]


@dataclass
class MisfitError(Exception):
    """Raised for a value that is not of its key's type.

    `kind` is that type without null, and `nullable` says whether the key may be null. `reason`, if
    it is given, replaces the message that these make.
    """

    key: str
    value: Any
    kind: Any
    nullable: bool
    reason: str | None = None


def merge(tree: Tree, more: Mapping[str, Any]) -> None:
    """Add the values of `more` to the tree: blocks are merged, any other value is replaced.

    `???` says that a value must be set. It replaces no value.
    """
    for name, value in more.items():
        previous_value = tree.get(name)
        if name in tree and is_missing(value):
            continue
        if isinstance(value, Mapping):
            tree[name] = previous_value if isinstance(previous_value, dict) else {}
            merge(tree[name], value)
        else:
            tree[name] = _copy(value)


def at(tree: Any, key: str) -> Any:
    """Return the value at a dotted key, or None.

    If a block around it is an interpolation, that is returned.
    """
    for name in key.split("."):
        if not isinstance(tree, Mapping):
            break
        tree = tree.get(name)
    return tree


def select(tree: Tree, key: str) -> Any:
    """Return the value at a dotted key, resolved if it is an interpolation.

    The result is None if there is no value or it cannot be resolved.
    """
    value = at(tree, key)
    if not is_interpolation(value):
        return value
    try:
        return OmegaConf.select(OmegaConf.create(tree), key)
    except OmegaConfBaseException:  # it is reported where the whole config is resolved
        return None


def complete(schema: type, values: Tree) -> Tree:
    """Return the tree of a schema with these values, each in its key's type, and all defaults.

    Options of other kinds than the chosen ones are left out.

    Raises: MisfitError: a value is not of its key's type.
    """

    @cache
    def untyped() -> Tree:
        """Return the values over all defaults, for resolving kinds that are interpolations."""
        tree = _copy(_defaults(schema))
        merge(tree, values)
        return tree

    def kind(key: str, value: Any) -> Any:
        return select(untyped(), key) if is_interpolation(value) else value

    return _completed(schema, values, "", kind)


def _completed(
    block: type, raw: Mapping[str, Any], prefix: str, kind: Callable[[str, Any], Any]
) -> Tree:
    block_type: type[Any] = own_type(
        block, {n: kind(prefix + n, raw.get(n)) for n in kinds_of(block)}
    )
    hints = hints_of(block_type)  # type: ignore[arg-type]
    tree, inside = _copy(_defaults(block_type)), partial(_completed, kind=kind)  # type: ignore[arg-type]
    for name in [name for name in tree if name in raw and not is_missing(raw[name])]:
        tree[name] = _typed(f"{prefix}{name}", raw[name], hints[name], inside)
    return tree


@cache
def _defaults(block_type: type) -> Tree:
    tree = _copy(block_type())
    assert isinstance(tree, dict)
    return tree


def _copy(value: Any) -> Any:
    """Return a copy of nested values in which dataclasses are dicts of the keys of the config."""
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = (f.name for f in dataclasses.fields(value) if f.metadata.get("is_key", True))
        return {name: _copy(getattr(value, name)) for name in fields}
    return value


def _typed(key: str, value: Any, hint: Any, of_block: Callable[[type, Any, str], Any]) -> Any:
    """Return a value in its key's type: a quoted number as a number, an int as a float.

    Args:
        of_block: makes a block from its class, its mapping and the prefix of its keys.

    Raises: MisfitError
    """
    kind, nullable = split_null(hint)
    if value is None and (nullable or kind is Any):
        return None
    if is_interpolation(value) and of_block is not build:  # else it was escaped, and is text
        return value
    if is_union(kind):
        kind = next((member for member in types_in(kind) if is_of_type(member, value)), kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return of_block(kind, value, f"{key}.")  # type: ignore[arg-type]
    if kind in (int, float) and isinstance(value, str):
        try:  # what a file has was looked at before; a variable of the environment is text
            if re.search(r"[\s_]", value):
                raise ValueError
            return kind(value)
        except ValueError:
            raise MisfitError(key, value, kind, nullable) from None
    if value is None or dataclasses.is_dataclass(kind) or not is_of_type(kind, value):
        raise MisfitError(key, value, kind, nullable)
    if get_origin(kind) is list:
        (inner,) = get_args(kind)
        if dataclasses.is_dataclass(inner):
            _check_names(key, value, inner)  # type: ignore[arg-type]
        return [_typed(f"{key}[{i}]", item, inner, of_block) for i, item in enumerate(value)]
    if get_origin(kind) is dict:
        _, inner = get_args(kind)
        if dataclasses.is_dataclass(inner):  # `name:` alone is a block of defaults
            value = {name: {} if item is None else item for name, item in value.items()}
        elif inner is str:
            value = {name: str(item) for name, item in value.items()}
        return {name: _typed(f"{key}.{name}", v, inner, of_block) for name, v in value.items()}
    if kind is bool:
        return value if isinstance(value, bool) else value.lower() == "true"
    return kind(value) if kind in (int, float, str) else value


def _check_names(key: str, blocks: list[Any], block: type) -> None:
    """Raise MisfitError for an unknown key in a block that is in a list.

    The table of the schema's keys does not have these keys.
    """
    for index, item in enumerate(blocks):
        for name in item if isinstance(item, Mapping) else ():
            if name not in (hints := hints_of(block)):
                reason = f"unknown key '{name}'; the block has {', '.join(hints)}"
                raise MisfitError(f"{key}[{index}]", item, block, False, reason)


def has_interpolations(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(has_interpolations, value.values()))
    return (
        any(map(has_interpolations, value)) if isinstance(value, list) else is_interpolation(value)
    )


def resolved(tree: Tree) -> Tree:
    r"""Return the tree with its interpolations resolved, and each `\???` as the text `???`.

    Raises: OmegaConfBaseException: an interpolation points to nothing.
    """
    values: Any = unescape_missing(tree)
    if has_interpolations(tree):
        values = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    return values


def build(block: type, tree: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the config object of class `block` from a tree that is complete and resolved.

    The type of each block in it also has the classes of the block's kinds as bases. `prefix` begins
    the dotted keys in errors.

    Raises: MisfitError: an interpolation gave a value of another type.
    """
    block_type: type[Any] = own_type(block, tree)
    hints = hints_of(block_type)  # type: ignore[arg-type]
    if tree.keys() - hints.keys():
        raise MisfitError(prefix.rstrip("."), tree, block, False)
    return block_type(**{n: _typed(f"{prefix}{n}", v, hints[n], build) for n, v in tree.items()})
