"""The page: its data is what the responses say, and its script draws it."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.diagnostics.value_page.browser import drawn_by_node, needs_node
from tests.diagnostics.value_page.reading import page_json, unpacked
from tests.studies.inspection import made_up
from vapo.errors import UserError
from vapo.studies.inspection.report import Inspection, inspect_responses
from vapo.studies.inspection.responses import BadRow, InspectedResponse


def inspected(responses: Sequence[InspectedResponse | BadRow]) -> Inspection:
    return inspect_responses(responses, name="made up <b>", notes=["a note"], critic="their critic")


def test_cards_are_the_responses() -> None:
    responses = made_up.sound(20)
    data = page_json(inspected(responses).page())
    assert data["facts"]["critic"] == "their critic"
    assert data["notes"] == ["a note"]
    by_place = {r.place: r for r in responses}
    seen = 0
    for group in data["groups"]:
        assert group["num_correct"] == sum(
            r.reward > 0 for r in responses if r.group == group["prompt_id"]
        )
        for card in group["responses"]:
            own = by_place[card["place"]]
            values = unpacked(card["columns"]["value"], len(own.values or ()))
            assert values.tolist() == pytest.approx(own.values)
            ids = np.frombuffer(base64.b64decode(card["ids"]), "<i4")
            assert "".join(data["tokens"][str(i)] for i in ids) == own.response
            errors = unpacked(card["columns"]["value_error"], len(own.values or ()))
            assert errors.tolist() == pytest.approx([v - own.reward for v in own.values or ()])
            changes = unpacked(card["columns"]["td_error"], len(own.values or ()))
            following = [*(own.values or ())[1:], own.reward]
            expected = [b - a for a, b in zip(own.values or (), following, strict=True)]
            assert changes.tolist() == pytest.approx(expected, abs=1e-6)
            seen += 1
    assert seen >= 20
    assert {m["name"] for m in data["measures"]} >= {"value", "td_error", "rollout_logprob"}


@needs_node
def test_the_script_draws_verdicts_figures_and_the_course(tmp_path: Path) -> None:
    steps = [made_up.sound(8, step=step, seed=step) for step in range(8)]
    steps[4:] = map(made_up.untrained, steps[4:])
    file = tmp_path / "page.html"
    file.write_text(inspected([r for step in steps for r in step]).page(), encoding="utf-8")
    body = drawn_by_node(file)
    assert "Explained variance fell" in body
    assert "What to do: " in body
    assert "Over the steps" in body
    assert "made up &lt;b&gt;" in body
    assert body.count("<article") > 10
    for title in ("By response length", "Calibration of the value", "Mean reward"):
        assert title in body


@needs_node
@pytest.mark.parametrize("bare", ["values", "tokens", "everything"])
def test_what_a_file_lacks_is_left_out(bare: str, tmp_path: Path) -> None:
    names = {"values": ["values"], "tokens": ["tokens"]}.get(
        bare, ["values", "tokens", "logprobs", "is_truncated"]
    )
    nothing: dict[str, None] = dict.fromkeys(names)
    responses = [replace(r, **nothing) for r in made_up.sound(12)]  # type: ignore[arg-type]
    found = inspected(responses)
    file = tmp_path / "page.html"
    file.write_text(found.page(), encoding="utf-8")
    body = drawn_by_node(file)
    assert ("Calibration of the value" in body) == (bare == "tokens")
    assert "no values" in found.text() or bare == "tokens"
    if bare != "values":
        assert responses[0].response in body


def test_text_and_summary() -> None:
    found = inspected([*made_up.reads_length(made_up.sound()), BadRow("x, row 3", "no reward")])
    text = found.text()
    assert "WRONG: The critic reads length." in text
    assert "x, row 3: no reward" in text
    assert 'row "inspect: a critic that reads length"' in text
    summary = json.loads(json.dumps(found.summary(), allow_nan=False))
    assert summary["num_responses"] == 480
    assert summary["verdicts"][0]["anchor"] == "inspect-length"
    assert summary["critic"]["by_length"][0] > 0.9
    before, at, after = summary["return_correlations"]
    said = f"correlate by {before:.2f}, {at:.2f} and {after:.2f} at shifts -1, 0 and +1"
    assert said in text
    (table, *_) = page_json(found.page())["report"]["tables"]
    (row,) = [row for row in table["rows"] if "at shifts -1, 0, +1" in row[0]]
    assert row[1] == f"{before:.2f}, {at:.2f}, {after:.2f}"


def test_tokens_that_an_environment_wrote_are_left_out() -> None:
    """Values stand beside the sampled tokens alone."""
    responses = [
        replace(one, is_sampled=tuple(i % 2 == 0 for i in range(len(one.values or ()))))
        for one in made_up.sound(8)
    ]
    by_place = {one.place: one for one in responses}
    cards = [c for g in page_json(inspected(responses).page())["groups"] for c in g["responses"]]
    assert cards
    for card in cards:
        expected = (by_place[card["place"]].values or ())[::2]
        assert len(np.frombuffer(base64.b64decode(card["ids"]), "<i4")) == len(expected)
        values = unpacked(card["columns"]["value"], len(expected))
        assert values.tolist() == pytest.approx(expected)


def test_nothing_to_read() -> None:
    with pytest.raises(UserError, match=r"no response could be read; the first row: x, row 1: bad"):
        inspected([BadRow("x, row 1", "bad")])
