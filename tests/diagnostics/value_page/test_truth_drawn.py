"""What a reader sees of the truth on a page: the cards' charts, the verdict, tokens without one."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from tests.diagnostics.value_page.browser import drawings, drawn_by_node, needs_node
from tests.diagnostics.value_page.made_up_pages import made_up_truth, rendered, training_batch
from tests.diagnostics.value_truth.made_up_figures import figures
from tests.systems import system_config
from vapo.diagnostics.value_truth.measure import ValueTruth
from vapo.diagnostics.value_truth.points import TruthPoint


def drawn_page(tmp_path: Path, rows: list[int] | None, fragment: str = "") -> str:
    config = system_config("vapo")
    batch = training_batch(config)
    truth = None if rows is None else made_up_truth(batch, rows)
    file = tmp_path / "page.html"
    file.write_text(rendered(batch, config, truth)[0], encoding="utf-8")
    return drawn_by_node(file, fragment)


@needs_node
def test_a_page_with_truth_is_drawn(tmp_path: Path) -> None:
    document = drawn_page(tmp_path, [9, 11])
    assert 'data-ready="true"' in document
    assert "NaN" not in document
    assert "undefined" not in document
    header = html.unescape(document.partition("</header>")[0])
    assert "hidden" not in header
    assert "follows the truth within a response" in header
    assert 'row "the verdict: follows the truth"' in header
    assert "64 prompts, 16 continuations from each" in header
    cards = {
        re.findall(r"\u00b7 row (\d+)", card)[0]: card for card in document.split("<article")[1:]
    }
    assert {row for row, card in cards.items() if "Value beside the truth" in card} == {"9", "11"}
    batch = training_batch(system_config("vapo"))
    points = [p for p in made_up_truth(batch, [9, 11]).points if p.row == 11]
    chart = cards["11"].partition("<figure")[2].partition("</figure>")[0]
    assert 'viewBox="0 0 900 160"' in chart, "as wide as the row that it has alone"
    assert chart.count('<circle class="dot b"') == len(points) == 4
    assert chart.count('<path class="line b"') == 4
    for p in points:
        assert f"before token {p.num_tokens}: true value" in chart
    assert (
        f"{len(points)} prefixes measured: true value {points[0].mean:.2f} before token 0" in chart
    )
    assert "Calibration against the truth" in document
    assert "Mean value against the truth" in document


@needs_node
def test_tokens_without_truth_have_no_colour(tmp_path: Path) -> None:
    document = drawn_page(tmp_path, [11], "#truth_error")
    cards = {
        re.findall(r"\u00b7 row (\d+)", card)[0]: card for card in document.split("<article")[1:]
    }
    for row, card in cards.items():
        kinds = re.findall(r'<span class="(t[^"]*)"', card)
        assert kinds
        assert {"none" in kind.split() for kind in kinds} == {row != "11"}
    assert "no token has this number" in cards["9"]
    rows = list(cards)
    assert rows.index("11") == min(rows.index(row) for row in ("9", "10", "11") if row in rows)


@needs_node
def test_the_values_line_is_drawn_once_on_a_measured_card(tmp_path: Path) -> None:
    """The chart has the critic's line, so the small one is hidden while values are shown."""
    for fragment, hidden in (("", True), ("#advantage", False)):
        document = drawn_page(tmp_path, [11], fragment)
        (card,) = (c for c in document.split("<article")[1:] if "\u00b7 row 11" in c)
        (spark,) = re.findall(r'<div class="spark"[^>]*>', card)
        assert (" hidden" in spark) is hidden
        assert card.startswith(' class="')
        assert "measured" in card.partition(">")[0]


@needs_node
def test_a_response_with_a_truth_at_one_token_only(tmp_path: Path) -> None:
    """The others have no colour, and the line has gaps in their place."""
    config = system_config("vapo")
    batch = training_batch(config)
    alone = TruthPoint(11, 4, (1.0, -1.0), "made-up:3", 10, value=0.5, is_of_steps=False)
    file = tmp_path / "page.html"
    page, _ = rendered(batch, config, ValueTruth([alone], figures(), (-1.0, 1.0)))
    file.write_text(page, encoding="utf-8")
    document = drawn_by_node(file, "#truth_error")
    assert "NaN" not in document
    (card,) = (c for c in document.split("<article")[1:] if "\u00b7 row 11" in c)
    kinds = re.findall(r'<span class="(t[^"]*)"', card)
    assert ["none" in kind.split() for kind in kinds] == [True] * 4 + [False] + [True] * 5
    assert "9 of 10 tokens have no number" in card
    spark = card.partition('<div class="spark"')[2].partition("</svg>")[0]
    assert spark.count('<path class="line a"') == 1
    assert "1 prefix measured: true value 0.00 before token 4;" in card


@needs_node
@pytest.mark.parametrize("rows", [None, [9, 11]])
def test_every_drawing_has_a_name_with_its_numbers_and_the_keyboard_reaches_it(
    tmp_path: Path, rows: list[int] | None
) -> None:
    document = drawn_page(tmp_path, rows)
    found = drawings(document)
    assert len(found) == 6 + 12 + (4 if rows else 0)
    for drawing in found:
        head = drawing.partition(">")[0]
        assert 'role="img"' in head
        assert 'tabindex="0"' in head
        label = re.findall(r'aria-label="([^"]*)"', head)
        assert len(label) == 1
        assert re.search(r"\d", label[0]), label


@needs_node
def test_charts_stand_after_the_first_group(tmp_path: Path) -> None:
    for rows in (None, [9, 11]):
        document = drawn_page(tmp_path, rows)
        sections = document.split("<section")
        assert len(sections) == 5
        assert ["All rollouts" in section for section in sections[1:]] == [True] + [False] * 3
        assert "All rollouts" not in sections[0]
        assert sections[1].index("<article") < sections[1].index("All rollouts")


@needs_node
def test_a_page_without_truth_has_no_verdict(tmp_path: Path) -> None:
    document = drawn_page(tmp_path, None)
    assert re.search(r'<div id="verdict"[^>]* hidden=""', document)
    assert "truth" not in document


@needs_node
def test_legends_say_what_the_ends_mean(tmp_path: Path) -> None:
    document = html.unescape(drawn_page(tmp_path, [11], "#truth_error"))
    assert re.search(r'id="low">too pessimistic \u2264 \u2212[\d.]+<', document)
    assert re.search(r'id="high">\u2265 [\d.]+ too optimistic<', document)
