"""A page says what a word of this project means where it uses the word first, or links to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.config.fits import ROOT

GLOSSARY = "concepts.md#words-of-the-results-pages"
WORDS = {  # how the word is found -> links that lead to its meaning, beside the glossary
    r"\bslips?\b": (),
    r"\bmilestones?\b": ("#milestones-as-credit",),
    r"\bcommon rate\b": (),
    r"\bwhole critics?\b": (),
    r"\binformed critics?\b": (),
    r"\bmissed checks\b": ("ablation.md", "data.md#the-task-of-checked-steps"),
    r"\bvalues? for nothing\b": (),
    r"\bfresh prompts\b": (),
}
OWN_WORDS = {"concepts.md", "language_model.md"}  # the glossary, and a page that tells of slips
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in OWN_WORDS]
_NOT_TEXT = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|`[^`\n]*`|^#[^\n]*$|!\[[^\]]*\]", re.M | re.S)


def unexplained(text: str) -> list[str]:
    """Return the words that no link, no emphasis and no parenthesis explains in the line of their
    first use. A link's address is no use of the word."""
    lines = _NOT_TEXT.sub("", text).splitlines()
    addresses_of_links = re.compile(r"\]\([^)]*\)")
    missing = []
    for word, addresses in WORDS.items():
        pattern = re.compile(word, re.IGNORECASE)
        uses = (line for line in lines if pattern.search(addresses_of_links.sub("]", line)))
        first = next(uses, None)
        if first is None:
            continue
        is_linked = any(f"{address})" in first or f"{address}#" in first for address in addresses)
        is_told = re.search(rf"\*{word}\*|{word} \(", first, re.IGNORECASE)
        if not (is_linked or is_told or GLOSSARY in first):
            missing.append(word)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_private_word_is_explained_at_its_first_use(page: Path) -> None:
    assert not unexplained(page.read_text()), f"link to {GLOSSARY}, or say what it means"


def test_an_unexplained_word_is_found() -> None:
    text = "# Title\n\n## Part\n\nOn missed checks it is ahead.\n\nOn [missed checks](ablation.md)."
    assert unexplained(text) == [r"\bmissed checks\b"]
    assert unexplained("What is left are slips.") == [r"\bslips?\b"]
    explained = (
        "On [missed checks](ablation.md#the-table) it is ahead, *slips* (unlikely tokens) are few.",
        "## Fresh prompts\n\nOn [fresh prompts](concepts.md#words-of-the-results-pages).",
        "`milestones/shared_share` and ![missed checks](a.png), see [a table](b.md#missed-checks).",
    )
    for text in explained:
        assert not unexplained(text), text


def test_the_glossary_has_every_word() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    table = page.partition("## Words of the results pages")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    for word in WORDS:
        assert any(re.search(word, row) for row in rows), word
