"""No response can do anything in the page, whatever it says."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.diagnostics.value_page.browser import drawn, needs_browser
from tests.diagnostics.value_page.made_up_pages import ABOUT, contents_of, training_batch
from tests.diagnostics.value_page.reading import page_json
from tests.systems import system_config
from tests.tiny_model import tiny_tokenizer
from vapo.diagnostics.value_page.rendering import render_page
from vapo.diagnostics.value_page.token_text import TokenText
from vapo.types import Prompt

HOSTILE = "</script><script>document.title='x'</script><!--\u202e\x00\ud800 & {{script}} <b>"


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data


def hostile_page() -> tuple[str, dict[str, Any]]:
    config = system_config("vapo", "value_pages.num_groups=1")
    batch = training_batch(config)
    prompt = Prompt(HOSTILE, HOSTILE, (2, 3), HOSTILE)
    batch = replace(
        batch,
        rollouts=[
            replace(r, prompt=prompt, extracted=HOSTILE, failure=HOSTILE) for r in batch.rollouts
        ],
    )
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([HOSTILE.replace("\ud800", "").replace("\x00", "\x01")])
    batch.response_ids[:] = len(tokenizer) - 1
    page = render_page(contents_of(batch, config), TokenText(tokenizer), ABOUT)
    return page, page_json(page)


def test_hostile_text_stays_text() -> None:
    page, data = hostile_page()
    elements = Elements()
    elements.feed(page)
    assert len(elements.scripts) == 2
    assert not {"b", "i", "img", "iframe", "object", "link", "base"} & set(elements.tags)
    assert elements.links == []
    assert "&lt;/title&gt;" in page
    token = next(iter(data["tokens"].values()))
    expected = "</script><script>document.title='x'</script><!--⟨U+202E⟩"
    assert token.startswith(expected)
    group = data["groups"][0]
    for text in (group["prompt"], group["prompt_id"], group["answer"]):
        assert text.startswith(f"{expected}␀⟨U+D800⟩")
    assert group["responses"][0]["extracted"].endswith("& {{script}} <b>")


def test_data_is_plain_ascii_without_markup() -> None:
    page, _ = hostile_page()
    start = page.index('id="data">') + len('id="data">')
    data = page[start:].partition("</script")[0]
    assert data.isascii()
    assert not set(data) & set("<>&\x00\x1b\u202e")


def test_policy_admits_the_pages_own_script_and_style_only() -> None:
    page, _ = hostile_page()
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    policy = dict(part.strip().split(" ", 1) for part in found[1].split(";"))
    assert policy["default-src"] == "'none'"
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    style = page.partition("<style>")[2].partition("</style>")[0]
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert way not in script


@pytest.mark.attacks
@needs_browser
def test_a_browser_draws_it_and_switches_colours(tmp_path: Path) -> None:
    """The script runs to its end; tokens are there as text; the measure of the URL is chosen."""
    page, data = hostile_page()
    file = tmp_path / "page.html"
    file.write_text(page)
    plain, advantage = drawn(file), drawn(file, "#advantage")
    for dom, scale in ((plain, "sequential"), (advantage, "diverging")):
        assert re.search(rf'<body[^>]*data-scale="{scale}"', dom)
        assert 'data-ready="true"' in dom
        assert "<title>a run &lt;/title&gt;&lt;b&gt;</title>" in dom
        assert dom.count("<article") == len(data["groups"][0]["responses"])
        assert dom.count("<figure>") == 6
    assert re.search(r'class="t[^"]*"[^>]*>&lt;/script&gt;&lt;script&gt;', plain)
    strengths = [
        re.findall(r'class="t[^"]*" style="--x: ([\d.]+)', dom) for dom in (plain, advantage)
    ]
    assert len(strengths[0]) == sum(r["num_tokens"] for r in data["groups"][0]["responses"])
    assert strengths[0] != strengths[1]
