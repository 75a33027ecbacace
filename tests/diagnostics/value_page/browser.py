"""What a real browser makes of a page."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs Debian's chromium"
)


def drawn(file: Path, fragment: str = "") -> str:
    """The document once the page's script has run, in a window that shows all of it.

    Tokens are drawn when they come into view, which a busy machine's browser may not have seen to
    when it prints the document: what is not drawn yet has a height to keep its place.
    """
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [
        "--window-size=1400,4000",
        "--virtual-time-budget=3000",
        f"--user-data-dir={file.parent / 'profile'}",
    ]
    command.append("--run-all-compositor-stages-before-draw")
    for _ in range(5):
        done = subprocess.run(
            [*command, f"{file.as_uri()}{fragment}"], capture_output=True, text=True, timeout=120
        )
        if "<article" in done.stdout and "min-height:" not in done.stdout.partition("<body")[2]:
            return done.stdout
    raise AssertionError(f"not all of {file} is drawn after five tries: {done.stderr[-500:]}")


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")


def drawn_by_node(file: Path, fragment: str = "", clicked: tuple[int, int] | None = None) -> str:
    """The same of Node with the few parts of a document that the script uses (small_dom.js).

    Args:
        clicked: a card and a token of it, counted from 0, that is clicked.
    """
    script = Path(__file__).with_name("small_dom.js")
    chosen = [] if clicked is None else [":".join(map(str, clicked))]
    command = ["node", str(script), str(file), fragment, *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class DrawnResponse:
    """A card: `tokens` are (strength of the colour, is negative)."""

    row: int
    is_marked_right: bool
    verdict: str
    facts: dict[str, str]
    tokens: list[tuple[float, bool]]
    remark: str


def drawings(document: str) -> list[str]:
    """Each SVG with all that is in it."""
    return re.findall(r"<svg.*?</svg>", document, re.DOTALL)


def facts_of(text: str) -> dict[str, str]:
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)
    return {html.unescape(name): html.unescape(value) for name, value in found}


def drawn_groups(document: str) -> list[tuple[str, dict[str, str], list[DrawnResponse]]]:
    """Heading, facts and responses of each group."""
    found = []
    for section in document.split("<section")[1:]:
        head, *cards = section.split("<article")
        heading = html.unescape(head.partition("<h2>")[2].partition("</h2>")[0])
        found.append((heading, facts_of(head), [_response(card) for card in cards]))
    return found


def _response(card: str) -> DrawnResponse:
    row = re.search(r"\u00b7 row (\d+)", card)
    verdict = re.search(r'<span class="verdict">(.*?)</span>', card)
    remark = re.search(r'<div class="cut">(.*?)</div>', card)
    assert row is not None
    assert verdict is not None
    tokens = re.findall(r'<span class="t([^"]*)" style="--x: ([\d.]+);">', card)
    return DrawnResponse(
        row=int(row[1]),
        is_marked_right=card.startswith(' class="right"'),
        verdict=verdict[1],
        facts=facts_of(card.partition("</header>")[0]),
        tokens=[(float(x), "n" in kinds.split()) for kinds, x in tokens],
        remark="" if remark is None else remark[1],
    )
