"""One layer of the config: a YAML file or an override, with the line of each of its keys."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vapo.config import limits
from vapo.config.foreign_names import did_you_mean_key
from vapo.config.kinds import is_union, types_in
from vapo.config.options import Entry, Option, Section
from vapo.config.presets import preset_hint
from vapo.config.scalars import as_in_source, is_like_null, is_missing
from vapo.config.written import leaves
from vapo.errors import UserError, check_utf8
from vapo.errors.suggestions import did_you_mean, nearest_path

COMMAND_LINE, ROW = "command line", "overrides"
_OVERRIDES = (COMMAND_LINE, ROW)
"""Where overrides are written: in the shell, or in a row of a grid."""
EXTENDS = "extends"
"""The key of a file that names the files it builds on; it is no key of the config."""
_MAX_SHOWN_CHARS = 80

_NUMBERS = {
    int: re.compile(r"[-+]?[0-9]{1,19}"),
    float: re.compile(
        r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?\.?(?:inf|infinity|nan)",
        re.IGNORECASE,
    ),
}
"""Quoted numbers that are taken: without spaces, underscores and digits of other scripts."""


@dataclass(frozen=True)
class Layer:
    """One source of config values: a file, or the overrides of a command line.

    `lines` has the line of each dotted key. `folder` is the file's folder, or the one in which the
    command was typed; it is None for text from elsewhere.
    """

    name: str
    tree: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # as in `as_in_source`
    folder: str | None = None
    is_extended: bool = False  # a file that another one names, not the command line
    builds_on: frozenset[Path] = frozenset()  # the files that it extends, and those that they do

    @property
    def is_overrides(self) -> bool:
        return self.name in _OVERRIDES

    def place(self, key: str) -> str:
        """Return `file:line` where the key, or the nearest block around it, is written.

        The result is the layer's name alone if that line is not known.
        """
        while key not in self.lines and "." in key:
            key = key.rpartition(".")[0]
        return f"{self.name}:{self.lines[key]}" if key in self.lines else self.name

    def value(self, key: str) -> Any:
        value: Any = self.tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def leaves(self) -> list[str]:
        """Return the dotted keys of all values; an empty block counts as a value."""
        return [key for key, _ in leaves(self.tree)]


def read_file(path: Path) -> Layer:
    """Read a YAML file as a layer.

    Raises: UserError: it does not exist, or holds something other than a mapping.
    """
    text = text_of(path, option="--config")
    return replace(read_text(text, str(path)), folder=str(path.parent.resolve()))


def text_of(path: Path, *, option: str) -> str:
    """Return the text of a YAML file, which the user has named by this command-line option.

    Raises: UserError: it is not there, is too large for a config, or no text.
    """
    check_utf8(str(path), f"{option}: the file's name")
    try:
        with path.open("rb") as file:
            contents = file.read(limits.MAX_FILE_BYTES + 1)
        if len(contents) > limits.MAX_FILE_BYTES:
            raise UserError(
                f"{option} {path}: larger than {limits.MAX_FILE_BYTES} bytes, the most for a config"
            )
        return contents.decode("utf-8")
    except FileNotFoundError:
        hint = nearest_path(path)
        if path.parts[:1] == ("conf",) and not Path("conf").exists():
            above = next((f for up in Path.cwd().parents if (f := up / path).is_file()), None)
            hint = "; `vapo init` writes the shipped configs into this folder"
            if above is not None:
                hint = f"; did you mean {os.path.relpath(above)}?"
        raise UserError(f"{option} {path}: no such file{hint}") from None
    except IsADirectoryError:
        raise UserError(f"{option} {path}: this is a folder, give a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{option} {path}: not text in UTF-8") from None
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be read ({error.strerror})") from None


@lru_cache(maxsize=256)
def read_text(text: str, name: str) -> Layer:
    """Return the layer that a YAML text holds; `name` stands for the file in errors.

    Results are cached, because a sweep reads the same files for every row.

    Raises: UserError: the text is not valid YAML or is above a limit.
    """
    try:
        node = limits.composed_node(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = name if mark is None else f"{name}:{mark.line + 1}"
        reason = error.problem or error.context
        is_limit = isinstance(error, limits.LimitError)
        failure = "cannot be read as a config" if is_limit else "not valid YAML"
        raise UserError(f"{place}: {failure}: {reason}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    if node is None:
        return Layer(name, {})
    if not isinstance(node, yaml.MappingNode):
        raise UserError(
            f"{name}:{node.start_mark.line + 1}: a config is a mapping of keys to values"
        )
    lines, sources = dict[str, int](), dict[str, str]()
    try:
        _record_lines(node, "", name, lines)
        value = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        tree = as_in_source(node, value, "", sources)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{name}: cannot be read as a config: {reason}") from None
    assert isinstance(tree, dict)
    return Layer(name, tree, lines, sources)


def _record_lines(node: yaml.Node, prefix: str, name: str, lines: dict[str, int]) -> None:
    """Add the line of each dotted key below a YAML node to `lines`, and check keys and texts.

    `prefix` is the node's dotted key and a dot.

    Raises: UserError: a key is written twice or cannot be a name, an interpolation is malformed, or
    a scalar is above a limit.
    """
    if isinstance(node, yaml.ScalarNode) and (reason := limits.scalar_excess(node)) is not None:
        raise UserError(f"{_place(name, node)}: {prefix.rstrip('.')}: {reason}")
    if is_interpolation(node.value):
        try:
            OmegaConf.create({"value": node.value})
        except OmegaConfBaseException as error:
            place, reason = _place(name, node), str(error).splitlines()[0]
            raise UserError(f"{place}: {prefix.rstrip('.')}: {reason}") from None
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _record_lines(item, f"{prefix}{index}.", name, lines)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "":
            place = _place(name, key_node)
            where = f"{place}: {prefix.rstrip('.')}: " if prefix else f"{place}: "
            raise UserError(f"{where}cannot be read as a config: a key must be a name")
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        if lines.get(key, line) != line:
            raise UserError(f"{name}:{line}: duplicate key '{key}', first on line {lines[key]}")
        lines[key] = line
        _record_lines(value_node, f"{key}.", name, lines)


def _place(name: str, node: yaml.Node) -> str:
    return name if name in _OVERRIDES else f"{name}:{node.start_mark.line + 1}"


def read_value(text: str, key: str, place: str, sources: dict[str, str]) -> Any:
    """Return the value that a text stands for in YAML.

    `key` and `place` name it in errors. `sources` gets the text of each unquoted scalar that YAML
    does not read as text.

    Raises: yaml.YAMLError, OmegaConfBaseException, ValueError: the text is not valid YAML.
        UserError: a key is invalid or duplicate, an interpolation is malformed, or a scalar is
            above a limit.
    """
    node = limits.composed_node(text)
    if node is not None:
        _record_lines(node, f"{key}.", place, {})
    value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
    return as_in_source(node, value, key, sources)


def check_keys(
    layer: Layer,
    entries: Mapping[str, Entry],
    block: Mapping[Any, Any] | None = None,
    prefix: str = "",
) -> None:
    """Check that each key of a layer is in the schema, and that its value has the key's type.

    With `block`, only this block of the layer is checked, whose dotted keys begin with `prefix`.

    Raises: UserError that names the key, its place, and the nearest known key.
    """
    for name, value in (layer.tree if block is None else block).items():
        key = f"{prefix}{name}"
        place, entry = layer.place(key), entries.get(key)
        if key == EXTENDS:  # a file's own has been taken out
            raise UserError(f"{place}: {key} is a key of a config file, at its top")
        if name == EXTENDS:
            raise UserError(
                f"{place}: unknown key '{key}'; {EXTENDS} stands at the top of a config file, in "
                "no block"
            )
        if entry is None or (isinstance(name, str) and "." in name):
            raise UserError(f"{place}: unknown key '{key}'{_hint(key, value, entries)}")
        if isinstance(entry, Section):
            if isinstance(value, Mapping):
                check_keys(layer, entries, value, f"{key}.")
            elif not (value is None and entry.nullable) and not is_interpolation(value):
                raise UserError(
                    f"{place}: {key} is a block of keys, got {show(value)}; "
                    f"{preset_hint(value) or 'give keys below it, or leave it out'}"
                )
        elif (excess := limits.integer_excess(value)) or not _fits(entry, value):
            raise UserError(f"{place}: {key}: {excess or type_error(entry, value)}")


def _hint(key: str, value: Any, entries: Mapping[str, Entry]) -> str:
    if key in entries:
        return "; in a file, write dotted keys as nested blocks"
    hint, leaf = did_you_mean_key(key, entries), key
    while not hint and isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        leaf = f"{leaf}.{name}"
    if leaf != key:  # another library's block: what is in it?
        hint = did_you_mean_key(leaf, entries)
    return hint or "; `vapo fit --help` lists every key"


def _fits(option: Option, value: Any) -> bool:
    """Whether a value is of the option's type, or is null, missing or an interpolation.

    OmegaConf would convert some values of other types silently.
    """
    if value is None:
        return option.nullable
    return is_interpolation(value) or is_missing(value) or is_of_type(option.type, value)


def is_of_type(kind: Any, value: Any) -> bool:
    """Whether a key of this type may have a value, which is not null.

    A numeric key may have a quoted number, and a float key an integer.
    """
    if kind is Any:
        return True
    if is_union(kind):
        return any(is_of_type(member, value) for member in types_in(kind))
    is_mapping = get_origin(kind) is dict
    if is_mapping or isinstance(value, Mapping):
        items = list(value.values()) if isinstance(value, Mapping) else []
        is_text = kind != dict[str, str] or not any(
            item is None or isinstance(item, (Mapping, list)) for item in items
        )
        return is_mapping and isinstance(value, Mapping) and is_text
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list)
    if kind is bool:
        return isinstance(value, bool) or str(value).lower() in ("true", "false")
    if isinstance(value, (bool, list)):
        return False
    if kind in _NUMBERS and isinstance(value, str):
        return _NUMBERS[kind].fullmatch(value) is not None
    return kind is not int or isinstance(value, int)


def type_error(option: Option, value: Any) -> str:
    words = (get_args(kind) for kind in types_in(option.type) if get_origin(kind) is Literal)
    choices = [word for some in words for word in some]
    hint = did_you_mean(str(value), map(str, choices), quote="")
    if option.nullable and isinstance(value, str) and is_like_null(value):
        hint = "; write null"
    return f"expects {option.label}, got {show(value)}{hint}"


def is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def show(value: Any) -> str:
    """Return a value for an error message: nearly as the user wrote it, and cut if it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = "a block of keys" if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
