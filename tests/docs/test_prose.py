"""The documentation's running text is plain: short sentences, and the field's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config.fits import ROOT

PAGES = sorted([ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
MOST_WORDS = 50
UNIT = r"(?:prompt|response|token|iteration|minibatch|micro-batch|batch|group|component|line)"
PLAINER = {  # what readers stumbled over -> what to write
    r"\bin the place of\b": "instead of",
    r"\bso many\b": "the number itself, or `this many`",
    rf"\b(?:one|once|two|four) (?:\w+ )?(?:a|an) {UNIT}(?! of\b)": "`per`, or `for each`",
    rf"\b(?:responses|steps|tokens|bytes|anchors|rollouts|rewards) (?:a|an) {UNIT}\b(?! \w+s\b)": (
        "`per`, or `for each`"
    ),
    r"\bby who\b": "a sentence with a subject",
    r"\bis not there\b": "`is left out`, `does not exist`",
}
_CODE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and items of lists, each as one line; no tables, headings, pictures and code."""
    inside: list[str] = []
    for line in [*_CODE.sub("", text).splitlines(), ""]:
        starts_item = _ITEM.match(line) is not None
        ends = not line.strip() or starts_item or line.startswith(("|", "#", "![", "    "))
        if ends and inside:
            yield " ".join(inside)
            inside = []
        if starts_item or not ends:
            inside.append(_ITEM.sub("", line).strip())


def sentences(text: str) -> Iterator[str]:
    for paragraph in paragraphs(text):
        yield from re.split(r"(?<=[.!?])[*)\"]* +(?=[\w`*\[(\"])|(?<=:) (?=[A-Z`])", paragraph)


def words(sentence: str) -> int:
    """Code between backquotes is one word."""
    return len(re.sub(r"`[^`]*`", "code", sentence).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_can_be_read_at_once(page: Path) -> None:
    long = [one for one in sentences(page.read_text()) if words(one) > MOST_WORDS]
    assert not long, f"more than {MOST_WORDS} words: {long}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_words_are_those_of_the_field(page: Path) -> None:
    text = " ".join(_CODE.sub("", page.read_text()).split())
    found = [
        f"{match[0]!r} in {text[max(0, match.start() - 40) : match.end() + 40]!r}: write {instead}"
        for pattern, instead in PLAINER.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found, "\n".join(found)


def test_the_checks_see_what_they_are_for() -> None:
    text = "# Title\n\n- One item\n  goes on. And `a b c`; ends\n\n| a table | is out |\n\nLast."
    assert list(paragraphs(text)) == ["One item goes on. And `a b c`; ends", "Last."]
    assert list(sentences(text)) == ["One item goes on.", "And `a b c`; ends", "Last."]
    assert [words(sentence) for sentence in sentences(text)] == [4, 3, 1]
    for wrong in (
        "one response a prompt",
        "once an iteration",
        "54 bytes a token",
        "4 steps a batch",
    ):
        assert any(re.search(pattern, wrong) for pattern in PLAINER), wrong
    for right in (
        "one problem of a prompt",
        "it gives the tokens a group has",
        "one part of a batch",
    ):
        assert not any(re.search(pattern, right) for pattern in PLAINER), right
