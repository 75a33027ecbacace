"""The config part of `--help`: every key, grouped by its top-level block."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from vapo.config.options import Entry, Option, Section
from vapo.config.rules import written

_WIDTH = 96
_MAX_LINE = 120


def describe_keys(entries: Mapping[str, Entry]) -> str:
    """One paragraph per key: dotted key, type, default, range, meaning."""
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
    """The kinds that have the key, if not all have it."""
    found = [f"{key} {'|'.join(kinds)}" for key, kinds in entry.only.items()]
    return f" (with {', '.join(found)})" if found else ""


def _break_at_choices(line: str) -> list[str]:
    """A line with many choices continues in the next, after a `|`."""
    if len(line) <= _MAX_LINE:
        return [line]
    broken = line.rfind("|", 0, _WIDTH) + 1
    return [line[:broken], *_break_at_choices(f"      {line[broken:]}")] if broken else [line]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
