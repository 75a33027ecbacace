"""What the pages say of mistakes: of marked and unmarked ones, and at the end of the run too."""

from __future__ import annotations

import re

import pytest

from tests.config.fits import ROOT


def section(page: str, start: str) -> str:
    """From a heading or an item of a list to the next one."""
    text = (ROOT / page).read_text()
    end = r"\n## " if start.startswith("#") else r"\n- |\n\n"
    return re.split(end, text[text.index(start) + len(start) :], maxsplit=1)[0]


@pytest.mark.parametrize(
    ("page", "start"),
    [
        ("docs/results.md", "## Does the critic see mistakes?"),
        ("docs/value_page.md", "## A real run"),
        ("docs/index.md", "The picture shows two responses"),
    ],
)
def test_a_claim_names_both_groups(page: str, start: str) -> None:
    """A fall at a step that the policy marks itself shows only that the critic reads marks."""
    text = section(page, start)
    assert "unmarked" in text
    assert re.search(r"\bmarked\b|\bmarks\b", text)
    assert re.search(r"\bend of the run\b", text)


def test_the_figures_of_the_results_are_those_of_its_page() -> None:
    """Of each group: so many responses, the share that falls, and the values before and after."""
    found = section("docs/results.md", "## Does the critic see mistakes?")
    page = section("docs/value_page.md", "## A real run")
    figures = set(re.findall(r"[+-]\d\.\d\d|\b\d+ %|\b\d{2,4}\b(?= (?:marked|unmarked))", found))
    assert len(figures) >= 8
    assert not {figure for figure in figures if figure not in page}
