"""YAML files and overrides to a typed, checked config; `written` is the way back.

Layers are merged in order, the last wins; `extends` adds the files that a file builds on.
Interpolations are resolved after the last layer, so overrides reach them. Whatever is wrong is one
`UserError` that names the dotted key and where it is written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
    InterpolationValidationError,
    OmegaConfBaseException,
)

from vapo.config import environment_variables
from vapo.config.extends import read_files
from vapo.config.functions import fill_function_folders
from vapo.config.kinds import defining_class, option_names, select, typed
from vapo.config.layers import (
    COMMAND_LINE,
    Layer,
    check_keys,
    is_interpolation,
    read_overrides,
    read_text,
    show,
    type_error,
)
from vapo.config.options import Entries, Option, describe, nearest_key
from vapo.config.origins import Origins, made_from
from vapo.config.validation import first_problem
from vapo.config.written import flatten
from vapo.errors import UserError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Composed(Generic[_T]):
    """A checked config, and the tree that it was made from, interpolations kept."""

    config: _T
    tree: DictConfig


def load_config(schema: type[_T], files: Sequence[Path], overrides: Sequence[str]) -> _T:
    """Merge the files, then the overrides (`dotted.key=value`); the last wins.

    Raises: UserError: anything wrong with them, in one message.
    """
    return compose(schema, files, overrides).config


def compose(schema: type[_T], files: Sequence[Path], overrides: Sequence[str]) -> Composed[_T]:
    """As `load_config`, with the tree before interpolation (for `--print_config`)."""
    layers = [*read_files(files), read_overrides(overrides, describe(schema))]  # type: ignore[arg-type]
    return compose_layers(schema, layers)


def from_yaml(schema: type[_T], text: str, *, source: str) -> _T:
    """A config from YAML text, as `to_yaml` writes it; `source` names it in errors.

    Of an environment that is not used an earlier version recorded the options, too.
    """
    layer = read_text(text, source)
    environment = layer.tree.get("environment")
    if isinstance(environment, dict) and environment.get("kind") is None:
        layer.tree["environment"] = {"kind": None}
    return compose_layers(schema, [layer]).config


def compose_layers(schema: type[_T], layers: Sequence[Layer]) -> Composed[_T]:
    """As `compose`, from layers that are already read, in an order of the caller's own."""
    entries: Entries = describe(schema)  # type: ignore[arg-type]
    values, origins = OmegaConf.create({}), Origins()
    changed: list[tuple[Layer, Layer]] = []  # layers of the command line, what was there before
    for layer in layers:
        if layer.name == COMMAND_LINE and layer.tree:
            changed.append((layer, Layer("files", _container(values))))
        check_keys(layer, entries)
        _forget_other_kinds(values, layer, entries, origins)
        values = _merge(values, layer)
        origins.add(layer)
    tree = _typed(schema, values, entries, origins)
    _check_kinds(tree, entries, origins)
    fill_function_folders(tree, entries, origins)
    config = _to_object(tree, entries, origins)
    config.sources = made_from(config, layers, changed, entries)
    _check_values(config, entries, tree, origins)
    if (problem := first_problem(config)) is not None:
        message = config.from_environment.redact(problem.message)
        raise origins.error(message, *(key for key in problem.keys if key in entries))
    return Composed(config, tree)


def _forget_other_kinds(
    values: DictConfig, layer: Layer, entries: Entries, origins: Origins
) -> None:
    """Where the layer changes a kind, drop the options that the new kind does not share.

    An overlay that takes `kind: jsonl` must not read the `num_examples` of a generator below it.
    """
    for key in layer.leaves():
        entry, value = entries.get(key), layer.value(key)
        if not isinstance(entry, Option) or not entry.kinds or is_interpolation(value):
            continue
        if isinstance(value, (list, dict)):  # refused when it is merged
            continue
        before, after = _raw(values, key), entry.kinds.get(value)
        old = entry.kinds.get(entry.default if before is None else before)
        if old is None or old is after:
            continue
        block, _, _ = key.rpartition(".")
        around = OmegaConf.select(values, block)
        for name in option_names(old) if isinstance(around, DictConfig) else ():
            shared = defining_class(after, name)
            if shared is None or shared is not defining_class(old, name):
                around.pop(name, None)
                origins.forget(f"{block}.{name}")


def _merge(values: DictConfig, layer: Layer) -> Any:
    try:
        return OmegaConf.unsafe_merge(values, layer.tree)  # `values` is replaced: no copy
    except OmegaConfBaseException as error:  # an interpolation that is not one
        key = error.full_key or ""
        place = f"{layer.place(key)}: {key}" if key else layer.name
        raise UserError(f"{place}: {_first_line(error)}") from None


def _typed(schema: type, values: DictConfig, entries: Entries, origins: Origins) -> DictConfig:
    """The values in the types of their keys and kinds."""
    try:
        return typed(schema, values)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        entry, reason, value = entries.get(key), _first_line(error), _raw(values, key)
        if isinstance(entry, Option) and not isinstance(error, ConfigKeyError):
            reason = reason if is_interpolation(value) else type_error(entry, value)
            if value is None:  # another kind of the block may allow it
                reason = type_error(replace(entry, nullable=False), value)
        raise origins.error(f"{key}: {reason}" if key else reason, key) from None


def _check_kinds(tree: DictConfig, entries: Entries, origins: Origins) -> None:
    """Every key that is set is one of its block's kind."""
    for written in origins.layers:
        names = written.split(".")
        for key in (".".join(names[: n + 1]) for n in range(len(names))):
            entry = entries.get(key)
            for kind_key, kinds in entry.only.items() if entry is not None else ():
                own = _beside(key, kind_key)
                value = select(tree, own)
                if value not in kinds:
                    hint = _readable(key, value, entries)
                    if value is None and not hint:
                        hint = f"; set {own}, or leave {key} out"
                    raise origins.error(
                        f"unknown key '{key}' with {own} {show(value)}: it is a key of "
                        f"{', '.join(kinds)}{hint}",
                        written,
                    )


def _beside(key: str, kind_key: str) -> str:
    """The key that names the kind of `key`'s block, below the user's own names."""
    return ".".join([*key.split(".")[:-1], kind_key.rpartition(".")[2]])


def _readable(key: str, value: Any, entries: Entries) -> str:
    """The nearest key that the block's kind does have."""
    generic = entries[key].key.rpartition(".")[0]
    names = [
        entry.key.rpartition(".")[2]
        for entry in entries.values()
        if entry.key.rpartition(".")[0] == generic
        and all(value in kinds for kinds in entry.only.values())
    ]
    block, _, leaf = key.rpartition(".")
    close = difflib.get_close_matches(leaf, names, n=1)
    return f"; did you mean '{block}.{close[0]}'?" if close else ""


def _to_object(tree: DictConfig, entries: Entries, origins: Origins) -> Any:
    try:
        for key in sorted(OmegaConf.missing_keys(tree), key=entries.position):
            option = entries[key]
            by = [_beside(key, kind_key) for kind_key in option.only]
            needed = f"{by[0]} {select(tree, by[0])} needs {key}" if by else f"{key} must be set"
            raise origins.error(
                f"{needed}: {option.doc}; set it in a config file, or as {key}=VALUE", *by, key
            )
        config: Any = OmegaConf.to_object(tree)
        config.from_environment = environment_variables.read_environment(tree, config)
        return config
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        reason = _interpolation_reason(error, entries, key, tree)
        raise origins.error(f"{key}: {reason}" if key else reason, key) from None
    except OverflowError:
        raise UserError("an interpolation in the config gives a number that is too large") from None


def _interpolation_reason(
    error: OmegaConfBaseException, entries: Entries, key: str, tree: DictConfig
) -> str:
    reason, raw, entry = _first_line(error), _raw(tree, key), entries.get(key)
    if missing := re.search(r"Environment variable '(.*)' not found", reason):
        return (
            f"the environment variable {missing[1]} is not set, and {raw} reads it: export it, "
            f"or set {key or 'the key'} to a value"
        )
    variables = environment_variables.variables_in(OmegaConf.to_container(tree, resolve=False))
    if variables and isinstance(error, InterpolationValidationError):  # OmegaConf's shows the value
        kind = entry.label if isinstance(entry, Option) else "another type"
        return f"expects {kind}, and what {raw} stands for is not"
    if environment_variables.MARKED.search(reason):
        return f"{raw}: a variable of the environment gives a value, not the name of a key"
    reason = environment_variables.redact_variables(reason, variables)
    target = re.search(r"Interpolation key '(.*)' not found", reason)
    if isinstance(error, InterpolationKeyError) and target:
        close = nearest_key(target[1], entries)
        hint = f"did you mean '${{{close}}}'?" if close else "no key has this name"
        return f"interpolation '${{{target[1]}}}' points to nothing; {hint}"
    if isinstance(error, InterpolationToMissingValueError):
        return f"{reason} (the key it points to is not set)"
    return reason


def _check_values(config: Any, entries: Entries, tree: DictConfig, origins: Origins) -> None:
    through: list[UserError] = []
    for key, value in flatten(config).items():
        entry = entries.get(key)
        option = entry if isinstance(entry, Option) else Option(key, float, True, None, "", {})
        if (reason := option.misfit(value)) is None:
            continue
        if config.from_environment.under(key):  # the reason shows the value
            kind = "an integer of at most 63 bits" if option.type is int else "a finite number"
            reason = f"must be {kind}{', ' if option.range else ''}{option.range}"
        if not is_interpolation(raw := _raw(tree, key)):
            raise origins.error(f"{key} {reason}", key)
        through.append(origins.error(f"{key} {reason} (from {raw})", key))
    if through:  # only where the key that the value comes from allows it
        raise through[0]


def _raw(tree: Any, key: str) -> Any:
    """What is written at a key, or at the block around it that is an interpolation."""
    value = OmegaConf.to_container(tree, resolve=False)
    for name in key.split("."):
        if not isinstance(value, Mapping):
            break
        value = value.get(name)
    return value


def _container(tree: DictConfig) -> dict[str, Any]:
    """A copy, with the interpolations."""
    raw = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
