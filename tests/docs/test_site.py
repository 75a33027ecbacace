"""The documentation's site: what it generates, and that links work there and on a code host."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from docs.hooks import code_reference, config_reference, llms, notebooks
from docs.hooks.plain_docstrings import laid_out
from tests.config.fits import ROOT
from vapo.config.options import Option, describe

pytestmark = pytest.mark.slow  # `make docs` builds the site, too

OUTPUTS = [
    {"output_type": "stream", "name": "stdout", "text": ["one\n"]},
    {"output_type": "stream", "name": "stdout", "text": ["two\n"]},
    {"output_type": "execute_result", "data": {"text/plain": ["1"]}},
    {
        "output_type": "execute_result",
        "data": {"text/html": ["<style>a {}\n</style>\n", "<table></table>"], "text/plain": "t"},
    },
    {"output_type": "display_data", "data": {"image/png": "iVBORw0=", "text/plain": ["<Figure>"]}},
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    build(config)
    return folder


class _Addresses(HTMLParser):
    """What a page loads or links to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loaded.append(found["href"])


def _read(page: Path) -> _Addresses:
    addresses = _Addresses()
    addresses.feed(page.read_text())
    return addresses


def _pages(site: Path) -> Iterator[Path]:
    return (page for page in site.rglob("*.html") if page.name != "404.html")


def test_a_page_loads_nothing_from_outside(site: Path) -> None:
    seen = 0
    for page in _pages(site):
        for address in _read(page).loaded:
            assert "//" not in address, (page.name, address)
            assert (page.parent / address.partition("?")[0]).exists(), (page.name, address)
            seen += 1
    assert seen > 100


def test_every_link_leads_to_a_file_and_a_heading_of_the_site(site: Path) -> None:
    read = {page.resolve(): _read(page) for page in _pages(site)}
    seen = 0
    for page, addresses in read.items():
        for link in addresses.links:
            path, _, anchor = link.partition("#")
            if "://" in path or path.startswith("mailto:"):
                continue
            other = (page.parent / path).resolve() if path not in ("", ".") else page
            assert other.exists(), (page.name, link)
            if anchor and other in read:
                assert anchor in read[other].ids, (page.name, link)
                seen += 1
    assert seen > 100


def test_the_search_finds_how_to_turn_thinking_off(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    (found,) = (e for e in index["docs"] if e["title"] == "How do I turn thinking off?")
    assert found["location"] == "data.html#how-do-i-turn-thinking-off"
    assert "chat_template_kwargs: {enable_thinking: false}" in found["text"]


def test_links_out_of_the_folder_lead_to_copies(site: Path) -> None:
    ablation = (site / "ablation.html").read_text()
    assert 'href="repository/experiments/LOG.html"' in ablation
    assert 'src="repository/experiments/ablation/missed_checks/positions_systems.png"' in ablation
    source = (site / "repository/vapo/config/checkpoints.py.html").read_text()
    assert "keep_rollouts" in source


def test_the_reference_has_every_key_of_every_schema() -> None:
    page = config_reference.page().replace("<wbr>", "")
    rows = dict(re.findall(r"^\| <code>(\S+)</code> \| (.*) \|$", page, re.MULTILINE))
    wanted = {
        key
        for schema in config_reference.SCHEMAS
        for key, entry in describe(schema).items()
        if isinstance(entry, Option)
    }
    assert set(rows) == wanted


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("components.length_adaptive_gae.alpha", ("`0.05`", "float, &#62; 0", "(paper: 0.05)")),
        ("actor.path", ("required", "text", "Hugging Face folder")),
        ("critic.head.num_bins", ("`101`", "int, &#62;= 2", "`critic.head.kind` is `categorical`")),
        ("critic.frozen", ("`[]`", "list", "as self&#95;attn.")),
    ],
)
def test_a_row_has_default_type_range_and_meaning(key: str, cells: tuple[str, ...]) -> None:
    page = config_reference.page().replace("<wbr>", "")
    (row,) = re.findall(rf"^\| <code>{re.escape(key)}</code> .*$", page, re.MULTILINE)
    assert row.count(" | ") == 3
    for cell in cells:
        assert cell in row


def test_a_docstring_becomes_paragraphs_and_an_example() -> None:
    text = "One.\n\nSource: a,\nb.\nUnits: c.\nRaises: d.\n\n>>> f(1)\n2\n"
    assert laid_out(text) == (
        "One.\n\nSource: a,\nb.\n\nUnits: c.\n\nRaises: d.\n\n```pycon\n>>> f(1)\n2\n```\n"
    )


def test_the_reference_has_what_the_package_offers(site: Path) -> None:
    ids = _read(site / "reference/api.html").ids
    assert {f"vapo.api.{name}" for name in ("fit", "validate", "load_config", "Run.metrics")} <= ids
    ids = _read(site / "reference/math.html").ids
    assert {"vapo.functional.advantages.gae", "vapo.functional.losses.clipped_surrogate"} <= ids
    assert (
        code_reference.math_page().count(":::") == len(list(code_reference.MATH.glob("*.py"))) - 1
    )


def test_a_notebook_is_a_page(site: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["x = 1\n", "x"], "outputs": OUTPUTS},
    ]
    assert notebooks.as_markdown({"cells": cells}, "a.ipynb") == (
        "# Title\n\nText.\n\n```python\nx = 1\nx\n```\n\n"
        "``` { .text .output }\none\ntwo\n```\n\n"
        "``` { .text .output }\n1\n```\n\n"
        "<table></table>\n\n"
        "![What the cell drew](a_outputs/cell_1.png)\n\n"
        "This page is the notebook [a.ipynb](a.ipynb).\n"
    )
    assert "tutorial.html" in _read(site / "python.html").links
    assert "tutorial.ipynb" in _read(site / "tutorial.html").links


def test_the_notebooks_page_shows_what_its_cells_gave(site: Path) -> None:
    page = (site / "tutorial.html").read_text()
    assert "held-out score: " in page
    assert "<td>" in page, "the table of prefixes"
    pictures = [src for src in _read(site / "tutorial.html").loaded if "outputs/" in src]
    assert len(pictures) == 2
    for picture in pictures:
        assert (site / picture).read_bytes().startswith(b"\x89PNG")


def test_the_search_works_from_a_folder_and_leaves_sources_out(site: Path) -> None:
    """A browser reads no JSON from a folder: the index is a script."""
    index = (site / "search" / "search_index.js").read_text().partition("=")[2]
    entries = json.loads(index)["docs"]
    places = {entry["location"].partition("#")[0] for entry in entries}
    assert "environments.html" in places
    assert not {place for place in places if re.search(r"\.(py|yaml|sh)\.html$", place)}
    boosts = {e["location"]: e.get("boost", 1) for e in entries if "#" not in e["location"]}
    assert boosts["environments.html"] == 1
    assert boosts["repository/experiments/LOG.html"] < 1
    assert re.split(json.loads(index)["config"]["separator"], "environment.max_turns") == [
        "environment",
        "max_turns",
    ]
    assert "iframe-worker.js" in _read(site / "environments.html").loaded


def test_language_models_get_the_pages_as_text(site: Path) -> None:
    """llms.txt lists them, each is beside its page, and llms-full.txt has all."""
    index = (site / "llms.txt").read_text()
    assert index.startswith("# vapo\n\n> Value-based reinforcement learning")
    listed = re.findall(r"^- \[(.+?)\]\((\S+)\): (.+)$", index, re.MULTILINE)
    assert len(listed) > 25
    assert "## How to" in index
    full = (site / "llms-full.txt").read_text()
    for _, target, description in listed:
        text = (site / target).read_text()
        assert text.strip() in full, target
        assert len(description) > 15, target
    names = {target for _, target, _ in listed}
    assert {"critics.md", "inspect.md", "reference/config.md", "tutorial.md"} <= names
    assert "reference/api.md" not in names
    assert llms.first_sentence("# T\n\n![a](b)\n\nOne [x](y)\nis. Two.") == "One x is."
