"""The page of every config key, made from the schema when the site is built."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.options import Entry, Option, describe

URI = "reference/config.md"
SCHEMAS = {
    FitConfig: ("vapo fit", "Keys of training"),
    SftConfig: ("vapo sft", "Keys of a cold start"),
    RewardModelConfig: ("vapo reward-model", "Keys of a reward model"),
}
INTRODUCTION = """\
# Config keys

This page is made from the schema in `vapo/config/`, so it lists every key that exists. A key is
written with dots on the command line (`actor.optimizer.lr=1e-6`) and as nested blocks in a YAML
file. The defaults are those of the schema. A task's own config, for instance `conf/vapo.yaml`, sets
some of them; `vapo fit --config conf/vapo.yaml --print_config` prints what results. "Required"
means that the key has no default. `NAME` stands for a name of your own. An unknown key is an error
that names the nearest known one.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, URI, content=page()))
    return files


def page() -> str:
    """The Markdown of the page: a table for each top-level block, first of `vapo fit`'s schema."""
    shown: set[str] = set()
    parts = [INTRODUCTION]
    for schema, (command, title) in SCHEMAS.items():
        entries = [entry for entry in describe(schema).values() if _identity(entry) not in shown]
        parts.append(f"## {title}\n\n`{command}` reads these keys.")
        if shown:
            parts[-1] += " Keys that are the same as those above are not repeated."
        parts += _tables(entries)
        shown |= {_identity(entry) for entry in entries}
    return "\n\n".join(parts) + "\n"


def _tables(entries: Iterable[Entry]) -> Iterator[str]:
    """One table for the keys at the top, then one for each block."""
    blocks: dict[str, list[Entry]] = {}
    for entry in entries:
        top, dot, _ = entry.key.partition(".")
        blocks.setdefault(top if dot or not isinstance(entry, Option) else "", []).append(entry)
    for block, inside in sorted(blocks.items(), key=lambda item: item[0] != ""):
        options = [entry for entry in inside if isinstance(entry, Option)]
        if not options:
            continue
        if block:
            yield f"### `{block}`"
            own = [entry.doc for entry in inside if entry.key == block]
            if own and own[0]:
                yield f"This block holds: {_escaped(own[0])}."
        head = "| key | default | type, range | meaning |\n|---|---|---|---|\n"
        yield head + "\n".join(_row(option) for option in options)


def _row(option: Option) -> str:
    key = option.key.replace(".", ".<wbr>")  # a long key may be broken after a dot
    cells = [
        f"<code>{key}</code>",
        "required" if option.required else f"`{json.dumps(option.default)}`",
        ", ".join(_plain(text) for text in (option.label, option.range) if text),
        _meaning(option),
    ]
    return f"| {' | '.join(cells)} |"


def _meaning(option: Option) -> str:
    """The key's meaning, and the kinds that alone have it."""
    text = _escaped(option.doc)
    for key, kinds in option.only.items():
        if kinds:
            text += f" (only where `{key}` is {' or '.join(f'`{kind}`' for kind in kinds)})"
    return text


def _escaped(text: str) -> str:
    """Text for a table's cell: outside backquotes no character has a meaning of its own."""
    parts = re.split(r"(`[^`]*`)", text.replace("\n", " "))
    return "".join(part if part.startswith("`") else _plain(part) for part in parts)


def _plain(text: str) -> str:
    return re.sub(r"[*_<>|\[\]{}]", lambda found: f"&#{ord(found[0])};", text)


def _identity(entry: Entry) -> Any:
    return (type(entry), entry.key, entry.doc, repr(getattr(entry, "default", None)))
