"""The config part of `--help`: every key, grouped by its top-level block."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from vapo.config.options import Entry, Option, Section

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
    text = f"{section.key}: {section.doc}{default}{_only(section)}"
    return textwrap.wrap(text, _WIDTH, **_indent("  "))


def _paragraph(option: Option) -> list[str]:
    default = "required" if option.required else f"default: {_show(option.default)}"
    limits = f"; {option.range}" if option.range else ""
    line = f"  {option.key}  {option.label} ({default}{limits})"
    return [*_break_at_choices(line), *_indented(option.doc + _only(option))]


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


def _indented(doc: str) -> list[str]:
    return textwrap.wrap(doc, _WIDTH, **_indent("      "))


def _indent(spaces: str) -> dict[str, Any]:
    return {"initial_indent": spaces, "subsequent_indent": spaces}


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)
