"""YAML files and overrides to a typed, checked config; `written` is the way back.

Layers are merged in order, the last wins; `extends` adds the files that a file builds on.
Interpolations are resolved after the last layer, so overrides reach them. Whatever is wrong is one
`UserError` that names the dotted key and where it is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
)

from vapo.config import environment_variables, trees
from vapo.config.chosen_systems import two_systems
from vapo.config.extends import read_files
from vapo.config.functions import fill_function_folders
from vapo.config.kinds import defining_class, option_names
from vapo.config.layers import (
    Layer,
    check_keys,
    is_interpolation,
    is_of_type,
    read_text,
    show,
    type_error,
)
from vapo.config.limits import expansion_excess
from vapo.config.options import Entries, Option, describe, nearest_key
from vapo.config.origins import Origins, made_from
from vapo.config.overrides import read_overrides
from vapo.config.paths import place_paths
from vapo.config.presets import alone_hint
from vapo.config.scalars import is_like_null, is_missing
from vapo.config.spelling import as_spelled
from vapo.config.trees import MisfitError, Tree, at, select
from vapo.config.validation import first_problem
from vapo.config.written import flatten, leaves, texts_of
from vapo.errors import UserError, check_utf8
from vapo.errors.redactor import Redactor
from vapo.errors.suggestions import nearest_name

_T = TypeVar("_T")


@dataclass(frozen=True)
class Composed(Generic[_T]):
    """A checked config, and the tree that it was made from, with interpolations unresolved."""

    config: _T
    tree: Tree


_MOVED = {
    ("algorithm", "value_clip"): ("critic", "value_clip"),
    ("trainer", "checkpoint_every_n_iterations"): ("checkpoints", "every_n_iterations"),
}
"""Where a recorded config of an earlier version has a key, and where it is now."""


def load_config(schema: type[_T], files: Sequence[Path], overrides: Sequence[str]) -> _T:
    """Return the config that files and overrides (`dotted.key=value`) give; the last wins.

    Raises: UserError: anything wrong with them, in one message.
    """
    return compose(schema, files, overrides).config


def compose(schema: type[_T], files: Sequence[Path], overrides: Sequence[str]) -> Composed[_T]:
    """Return the config that files and overrides give, and its tree before interpolation.

    `--print_config` shows that tree. Raises: UserError.
    """
    layers = [*read_files(files), read_overrides(overrides, describe(schema))]  # type: ignore[arg-type]
    return compose_layers(schema, layers)


def from_yaml(schema: type[_T], text: str, *, source: str) -> _T:
    """Return the config of a YAML text that `to_yaml` wrote; `source` names it in errors.

    Texts of earlier versions are accepted, too: they have some keys in another place, options of an
    environment that is not used, and the text None without quotes.
    """
    layer = read_text(text, source)
    sources = {key: value for key, value in layer.sources.items() if not is_like_null(value)}
    layer = replace(layer, sources=sources)
    for (block, name), (new_block, new_name) in _MOVED.items():
        if isinstance(old := layer.tree.get(block), dict) and name in old:
            layer.tree.setdefault(new_block, {})[new_name] = old.pop(name)
    environment = layer.tree.get("environment")
    if isinstance(environment, dict) and environment.get("kind") is None:
        layer.tree["environment"] = {"kind": None}
    return compose_layers(schema, [layer]).config


def compose_layers(schema: type[_T], layers: Sequence[Layer]) -> Composed[_T]:
    """Merge layers, of which the last wins; return the config and its tree before interpolation.

    Raises: UserError: anything wrong with a layer, or with the config as a whole.
    """
    entries: Entries = describe(schema)  # type: ignore[arg-type]
    values: Tree = {}
    origins = Origins()
    changed: list[tuple[Layer, Layer]] = []  # layers of the command line, what was there before
    for written_layer in layers:
        check_utf8(
            written_layer.folder or "", f"the name of the folder of the {written_layer.name}"
        )
        check_keys(written_layer, entries)
        layer = as_spelled(written_layer, entries)
        if layer.is_overrides and layer.tree:
            previous_values: Tree = {}
            trees.merge(previous_values, values)
            changed.append((layer, Layer("files", previous_values)))
        _forget_other_kinds(values, layer, entries, origins)
        trees.merge(values, layer.tree)
        origins.add(layer)
    tree = _complete(schema, values, entries, origins)
    if (excess := expansion_excess(tree)) is not None:
        key, reason = excess
        raise origins.error(f"{key}: {reason}", key)
    _check_kinds(tree, entries, origins)
    fill_function_folders(tree, entries, origins)
    place_paths(tree, origins)
    files = [layer.name for layer in layers if not (layer.is_overrides or layer.is_extended)]
    config = _build(schema, tree, entries, origins, hint=alone_hint(files))
    contradiction = two_systems(layers)
    sources = made_from(config, layers, changed, entries)
    config.sources = replace(sources, two_systems=contradiction)
    _check_texts(config, origins)
    _check_values(config, entries, tree, origins)
    if (problem := first_problem(config)) is not None:
        also = filter(None, (origins.why_no_text(key, entries) for key in problem.keys))
        message = "; ".join([config.from_environment.redact(problem.message), *also])
        if contradiction is not None:
            raise UserError(f"{contradiction}. With both, {message}")
        raise origins.error(message, *(key for key in problem.keys if key in entries))
    for key in origins.layers:
        if (not_text := origins.why_no_text(key, entries)) is not None:
            raise origins.error(f"{key}: {not_text}", key)
    return Composed(config, tree)


def _forget_other_kinds(values: Tree, layer: Layer, entries: Entries, origins: Origins) -> None:
    """Remove from `values` the options of an earlier kind, where the layer names another kind.

    Options that both kinds share stay. So an overlay with `kind: jsonl` does not get the
    `num_examples` of a generator below it.
    """
    for key in layer.leaves():
        entry, value = entries.get(key), layer.value(key)
        if not isinstance(entry, Option) or not entry.kinds or is_interpolation(value):
            continue
        if isinstance(value, (list, dict)):  # refused when it is merged
            continue
        previous_value, after = at(values, key), entry.kinds.get(value)
        old = entry.kinds.get(entry.default if previous_value is None else previous_value)
        if old is None or old is after:
            continue
        block, _, _ = key.rpartition(".")
        around = at(values, block)
        for name in option_names(old) if isinstance(around, dict) else ():
            shared = defining_class(after, name)
            if shared is None or shared is not defining_class(old, name):
                around.pop(name, None)
                origins.forget(f"{block}.{name}")


def _complete(schema: type, values: Tree, entries: Entries, origins: Origins) -> Tree:
    """Return the values in their keys' types, with all defaults.

    Raises: UserError: a value is not of its key's type.
    """
    try:
        return trees.complete(schema, values)
    except MisfitError as misfit:
        raise origins.error(
            f"{misfit.key}: {_misfit_reason(misfit, entries)}", misfit.key
        ) from None


def _misfit_reason(misfit: MisfitError, entries: Entries) -> str:
    if misfit.reason is not None:
        return misfit.reason
    entry = entries.get(misfit.key)
    label = entry if isinstance(entry, Option) else Option("", Any, False, None, "", {})
    return type_error(replace(label, type=misfit.kind, nullable=misfit.nullable), misfit.value)


def _check_kinds(tree: Tree, entries: Entries, origins: Origins) -> None:
    """Raise UserError if a key is set that the kind of its block does not have."""
    for set_key in origins.layers:
        names = set_key.split(".")
        for key in (".".join(names[: n + 1]) for n in range(len(names))):
            entry = entries.get(key)
            for kind_key, kinds in entry.only.items() if entry is not None else ():
                full_kind_key = _beside(key, kind_key)
                value = select(tree, full_kind_key)
                kind_option = entries[full_kind_key]
                assert isinstance(kind_option, Option)
                if is_interpolation(at(tree, full_kind_key)) and not is_of_type(
                    kind_option.type, value
                ):
                    continue  # reported where the whole config is built
                if value not in kinds:
                    hint = _hint_of_kind(key, value, entries)
                    if value is None and not hint:
                        hint = f"; set {full_kind_key}, or leave {key} out"
                    raise origins.error(
                        f"unknown key '{key}' with {full_kind_key} {show(value)}: it is a key of "
                        f"{', '.join(kinds)}{hint}",
                        set_key,
                    )


def _beside(key: str, kind_key: str) -> str:
    """Return the key that names the kind of the block in which `key` stands.

    `kind_key` is that key in the schema. The result has the user's own names in the place of
    `NAME`.
    """
    return ".".join([*key.split(".")[:-1], kind_key.rpartition(".")[2]])


def _hint_of_kind(key: str, value: Any, entries: Entries) -> str:
    """Return `; did you mean '...'?` with the nearest key that a block of a kind has, or "".

    `value` is the kind of the block in which `key` stands.
    """
    generic = entries[key].key.rpartition(".")[0]
    names = [
        entry.key.rpartition(".")[2]
        for entry in entries.values()
        if entry.key.rpartition(".")[0] == generic
        and all(value in kinds for kinds in entry.only.values())
    ]
    block, _, leaf = key.rpartition(".")
    nearest = nearest_name(leaf, names)
    return f"; did you mean '{block}.{nearest}'?" if nearest else ""


def _build(schema: type, tree: Tree, entries: Entries, origins: Origins, *, hint: str) -> Any:
    """Return the config of a tree of values, whose interpolations are resolved here.

    `hint` ends the error for a value that is not set. It says how else the value can be given.

    Raises: UserError: a value is not set, or an interpolation gives one of another type.
    """
    missing = [key for key, value in leaves(tree) if is_missing(value)]
    for key in missing:
        if key not in entries:  # it is in a mapping of the user's own names
            raise origins.error(f"{key} must be set: ??? stands for a value that is not there", key)
    for key in sorted(missing, key=entries.position):
        option = entries[key]
        by = [_beside(key, kind_key) for kind_key in option.only]
        requirement = f"{by[0]} {select(tree, by[0])} needs {key}" if by else f"{key} must be set"
        raise origins.error(
            f"{requirement}: {option.doc}; set it in a config file, or as {key}=VALUE{hint}",
            *by,
            key,
        )
    try:
        config = trees.build(schema, trees.resolved(tree))
        config.from_environment = environment_variables.read_environment(tree, config)
        return config
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        reason = _interpolation_reason(error, entries, key, tree)
    except MisfitError as misfit:
        key = misfit.key
        reason = f"{_misfit_reason(misfit, entries)} (from {at(tree, key)})"
        if environment_variables.variables_in(tree):  # the reason shows the value
            entry = entries.get(key)
            kind = entry.label if isinstance(entry, Option) else "a block of keys"
            reason = f"expects {kind}, and what {at(tree, key)} stands for is not"
    except OverflowError:
        raise UserError("an interpolation in the config gives a number that is too large") from None
    raise origins.error(f"{key}: {reason}" if key else reason, key)


def _interpolation_reason(
    error: OmegaConfBaseException, entries: Entries, key: str, tree: Tree
) -> str:
    reason, raw = _first_line(error), at(tree, key)
    if missing := re.search(r"Environment variable '(.*)' not found", reason):
        return (
            f"the environment variable {missing[1]} is not set, and {raw} reads it: export it, "
            f"or set {key or 'the key'} to a value"
        )
    if environment_variables.MARKED.search(reason):
        return f"{raw}: a variable of the environment gives a value, not the name of a key"
    variables = environment_variables.variables_in(tree)
    reason = Redactor(environment_variables.texts_of_variables(variables))(reason)
    target = re.search(r"Interpolation key '(.*)' not found", reason)
    if isinstance(error, InterpolationKeyError) and target:
        close = nearest_key(target[1], entries)
        hint = f"did you mean '${{{close}}}'?" if close else "no key has this name"
        return f"interpolation '${{{target[1]}}}' points to nothing; {hint}"
    if isinstance(error, InterpolationToMissingValueError):
        return f"{reason} (the key it points to is not set)"
    return reason


def _check_texts(config: Any, origins: Origins) -> None:
    """Raise UserError if a text in the config, or a name in it, cannot be written in UTF-8."""
    for key, text in texts_of(environment_variables.values_of(config)):
        try:
            check_utf8(text, key)
        except UserError as error:
            raise origins.error(str(error), key) from None


def _check_values(config: Any, entries: Entries, tree: Tree, origins: Origins) -> None:
    through: list[UserError] = []
    for key, value in flatten(config).items():
        entry = entries.get(key)
        option = entry if isinstance(entry, Option) else Option(key, float, True, None, "", {})
        if (reason := option.misfit(value)) is None:
            continue
        if config.from_environment.under(key):  # the reason shows the value
            kind = "an integer of at most 63 bits" if option.type is int else "a finite number"
            reason = f"must be {kind}{', ' if option.range else ''}{option.range}"
        if not is_interpolation(raw := at(tree, key)):
            raise origins.error(f"{key} {reason}", key)
        through.append(origins.error(f"{key} {reason} (from {raw})", key))
    if through:  # only where the key that the value comes from allows it
        raise through[0]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
