"""Every key of a schema as a flat table: what the checks, the help text and the tests read."""

from __future__ import annotations

import dataclasses
import math
import operator
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from vapo.config.kinds import kinds_of, make, split_null, types_in
from vapo.config.limits import integer_excess
from vapo.config.rules import written
from vapo.errors.suggestions import nearest_name

_BOUNDS = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
}
_WIDTH = 96
_MAX_LINE = 120  # of the help
_LABELS = {
    bool: "true|false",
    int: "int",
    float: "float",
    str: "text",
    dict[str, str]: "mapping of text",
}
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127  # the mathematics is done in it
NAME = "NAME"
"""Stands for a name of the user's own in the keys of a block of named blocks."""
Only = Mapping[str, tuple[str, ...]]
"""The dotted key that names a kind -> the kinds that have the option; empty: all have it."""


@dataclass(frozen=True)
class Option:
    """The description of a config key that holds a value: its type, default, help and bounds.

    `only` says which kinds have the key; if it is empty, all have it.
    """

    key: str
    type: Any
    nullable: bool
    default: Any
    doc: str
    bounds: Mapping[str, float]
    only: Only = field(default_factory=dict)
    kinds: Mapping[Any, type] = field(default_factory=dict)  # of a key that names a kind

    @property
    def required(self) -> bool:
        return isinstance(self.default, str) and self.default == MISSING

    @property
    def is_mapping(self) -> bool:
        return get_origin(self.type) is dict

    @property
    def label(self) -> str:
        """The type, as help and errors show it."""
        label = "|".join(map(_label, types_in(self.type)))
        return f"{label}|null" if self.nullable else label

    @property
    def range(self) -> str:
        """The bounds, as `> 0, <= 1`; empty if there are none."""
        return ", ".join(f"{_BOUNDS[name][0]} {bound:g}" for name, bound in self.bounds.items())

    def misfit(self, value: Any) -> str | None:
        """Return why a value of the right type is not allowed (range, size), or None if it is."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if (excess := integer_excess(value)) is not None:
            return f"is {excess}"
        if not math.isfinite(value):
            return f"must be a finite number, got {value}"
        if isinstance(value, float) and abs(value) > _MAX_FLOAT32:
            return f"must be at most 3.4e38 in size, got {value}"
        is_inside = all(_BOUNDS[name][1](value, bound) for name, bound in self.bounds.items())
        return None if is_inside else f"must be {self.range}, got {value}"


def _label(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(str(value) for value in get_args(kind))
    return "list" if get_origin(kind) is list else _LABELS.get(kind, "mapping")


@dataclass(frozen=True)
class Section:
    """The description of a config key that holds other keys."""

    key: str
    nullable: bool
    doc: str
    is_named: bool = False  # holds blocks of one schema, under names of the user's own
    only: Only = field(default_factory=dict)


Entry = Option | Section


class Entries(dict[str, Entry]):
    """The description of each config key, by dotted key.

    Some sections have names of the user's own as keys: there, each name finds the entry of `NAME`.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        super().__init__((entry.key, entry) for entry in entries)
        self._named_sections = [k for k, e in self.items() if isinstance(e, Section) and e.is_named]

    def __missing__(self, key: str) -> Entry:
        entry = self.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and super().__contains__(self._generic(key))

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(self._generic(key), default)

    def position(self, key: str) -> int:
        """Return the index of a key in the schema's order."""
        return list(self).index(self._generic(key))

    def _generic(self, key: str) -> str:
        for section_key in self._named_sections:
            if key.startswith(f"{section_key}."):
                _, dot, rest = key.removeprefix(f"{section_key}.").partition(".")
                return f"{section_key}.{NAME}{dot}{rest}"
        return key


@cache
def describe(schema: type) -> Entries:
    """Return the descriptions of a schema's keys in its order, each section before its keys."""
    return Entries(_entries(schema, schema(), ""))


def _entries(block: type, defaults: Any, prefix: str) -> Iterable[Entry]:
    """Yield the descriptions of a block's keys, including those of all its kinds.

    `defaults` is an instance of the block.
    """
    hints = get_type_hints(block)
    for option_field in dataclasses.fields(block):
        default = getattr(defaults, option_field.name)
        yield from _of_field(
            prefix + option_field.name, hints[option_field.name], option_field.metadata, default, {}
        )
    for name, kinds in kinds_of(block).items():
        having: dict[str, dict[str, Any]] = {}  # option -> its field in each kind that has it
        for value, kind in kinds.items():
            for option_field in dataclasses.fields(kind):
                having.setdefault(option_field.name, {})[value] = option_field
        for option, fields in having.items():
            kind, option_field = kinds[next(iter(fields))], next(iter(fields.values()))
            docs = dict.fromkeys(field.metadata.get("doc", "") for field in fields.values())
            metadata, only = (
                {**option_field.metadata, "doc": " / ".join(docs)},
                {prefix + name: (*fields,)},
            )
            hint, default = get_type_hints(kind)[option], getattr(kind(), option)
            yield from _of_field(prefix + option, hint, metadata, default, only)


def _of_field(
    key: str, hint: Any, metadata: Mapping[str, Any], default: Any, only: Only
) -> Iterable[Entry]:
    """Yield the description of a field and, if it holds a block, of all keys below it."""
    if not metadata.get("is_key", True):
        return
    doc = metadata.get("doc", "")
    kind, nullable = split_null(hint)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        yield Section(key, nullable, doc or _summary(kind), only=only)
        yield from _entries(kind, make(kind) if default is None else default, f"{key}.")
    elif get_origin(kind) is dict and dataclasses.is_dataclass(get_args(kind)[1]):
        inner = get_args(kind)[1]
        yield Section(key, nullable, doc, is_named=True, only=only)
        yield Section(f"{key}.{NAME}", False, _summary(inner))
        yield from _entries(inner, make(inner), f"{key}.{NAME}.")
    else:
        bounds, kinds = (metadata.get(name, {}) for name in ("bounds", "kinds"))
        yield Option(key, kind, nullable, default, doc, bounds, only, kinds)


def _summary(block: type) -> str:
    return (block.__doc__ or "").splitlines()[0]


def is_key(key: str, entries: Mapping[str, Entry]) -> bool:
    """Whether a dotted key is in the schema, or a free name inside an option that is a mapping."""
    if key in entries:
        return True
    block, _, _ = key.rpartition(".")
    around = entries.get(block)
    if isinstance(around, Option):
        return around.is_mapping
    return bool(block) and around is None and is_key(block, entries)


def holds_text(key: str, entries: Mapping[str, Entry]) -> bool:
    """Whether the schema has a text at a dotted key, which may be inside a list or mapping."""
    if isinstance(entry := entries.get(key), Option):
        return entry.type is str
    around = None
    while around is None and "." in key:  # a name of the user's own may have dots
        key = key.rpartition(".")[0]
        around = entries.get(key)
    return isinstance(around, Option) and around.type in (list[str], dict[str, str])


def nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """Return the known dotted key that a mistyped key most likely means, or None."""
    names = list(keys)
    parent, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in names if k.rpartition(".")[0] == parent}
    if nearest := nearest_name(leaf, siblings):
        return siblings[nearest]
    same_end = [k for k in names if k == key or k.endswith(f".{key}")]
    same_leaf = [k for k in names if k.rpartition(".")[2] == leaf]
    for candidates in (same_end, same_leaf):
        if candidates:  # a bare `alpha` is the paper's, and `num_iterations` the run's
            if len(highest := [k for k in candidates if k.count(".") == 1]) == 1:
                return highest[0]
            candidates = [k for k in candidates if k.startswith("components.")] or candidates
            return nearest_name(key, candidates, cutoff=0.0)
    if nearest := nearest_name(key, names, cutoff=0.7):
        return nearest
    leaves = {k.rpartition(".")[2]: k for k in names}
    nearest = nearest_name(leaf, leaves, cutoff=0.75)
    return leaves[nearest] if nearest else None


def describe_keys(entries: Mapping[str, Entry]) -> str:
    """Return the config part of `--help`: each key's type, default, range and meaning."""
    top = [e for e in entries.values() if isinstance(e, Option) and "." not in e.key]
    lines = ["config keys:", *(line for option in top for line in _paragraph(option))]
    for entry in entries.values():
        if isinstance(entry, Section):
            lines += _heading(entry)
        elif "." in entry.key:
            lines += _paragraph(entry)
    return "\n".join(lines)


def _heading(section: Section) -> list[str]:
    if "." not in section.key:
        return ["", f"{section.key}: {section.doc}"]
    default = " (block or null, default: null)" if section.nullable else ""
    return _wrapped(f"{section.key}: {section.doc}{default}{_only(section)}", "  ")


def _paragraph(option: Option) -> list[str]:
    value = repr(option.default) if isinstance(option.default, str) else written(option.default)
    default = "required" if option.required else f"default: {value}"
    limits = f"; {option.range}" if option.range else ""
    line = f"  {option.key}  {option.label} ({default}{limits})"
    return [*_break_at_choices(line), *_wrapped(option.doc + _only(option), "      ")]


def _only(entry: Entry) -> str:
    """Return ` (with KEY KIND|KIND)` if only these kinds have the key, else an empty text."""
    kinds_by_key = [f"{key} {'|'.join(kinds)}" for key, kinds in entry.only.items()]
    return f" (with {', '.join(kinds_by_key)})" if kinds_by_key else ""


def _break_at_choices(line: str) -> list[str]:
    """Return a help line as lines of at most about 120 characters, broken after a `|`."""
    if len(line) <= _MAX_LINE:
        return [line]
    broken = line.rfind("|", 0, _WIDTH) + 1
    return [line[:broken], *_break_at_choices(f"      {line[broken:]}")] if broken else [line]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
