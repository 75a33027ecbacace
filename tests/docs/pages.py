"""What the documentation's pages say to type, and what they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.config.fits import ROOT

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "AGENTS.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "experiments").rglob("README.md"),
    ]
)
CONFIGS = sorted((ROOT / "conf").rglob("*.yaml"))
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|(?<=\A))((?: {4}.*\n)+)")
_SPAN = re.compile(r"`([^`\n]+)`")
_END = {"|", ";", ";;", "&&", "||", "&"}


@dataclass(frozen=True)
class Command:
    """The words after `program`, and the page that says them."""

    page: str
    program: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.program} {' '.join(self.words)}"


def commands() -> list[Command]:
    """Every `vapo ...` and `make ...` of the pages' blocks and the configs' headers."""
    return [
        found
        for path in [*PAGES, *CONFIGS]
        for line in _lines(path)
        if (found := _command(str(path.relative_to(ROOT)), line)) is not None
    ]


def named_files() -> Iterator[tuple[str, str]]:
    """Name and text of the blocks that are to be written to a file: `<!-- NAME -->` before them."""
    for path in PAGES:
        yield from re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```", path.read_text(), re.DOTALL)


def spans() -> Iterator[tuple[str, str]]:
    """Page and text of what stands between backquotes in running text."""
    for path in PAGES:
        text = _INDENTED.sub("\n", _FENCED.sub("", path.read_text()))
        for span in _SPAN.findall(text):
            yield str(path.relative_to(ROOT)), span


def _lines(path: Path) -> Iterator[str]:
    """Lines to type, those that go on after a backslash joined."""
    text = path.read_text()
    if path.suffix == ".yaml":
        header = "".join(
            line.removeprefix("#") for line in text.splitlines(True) if line.startswith("#")
        )
        # a command's own line is set off by more than one space
        blocks = ["\n".join(re.findall(r"^ {2,}(.*(?:\\\n.*)*)$", header, re.MULTILINE))]
    else:
        blocks = [body for name, body in _FENCED.findall(text) if name in ("bash", "sh")]
        blocks += _INDENTED.findall(_FENCED.sub("", text))
    for block in blocks:
        yield from re.sub(r"\\\n", " ", block).splitlines()


def _command(page: str, line: str) -> Command | None:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an apostrophe in a program's output
        return None
    for index, word in enumerate(words):
        program = Path(word).name
        if program not in ("vapo", "make") or (program == "make" and index):
            continue
        rest = words[index + 1 :]
        end = next((i for i, other in enumerate(rest) if other in _END), len(rest))
        return Command(page, program, tuple(rest[:end]))
    return None
