"""What a reader sees is what the batch says: colours, verdicts, counts, group by group."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diagnostics.value_page.browser import drawn, drawn_groups, needs_browser
from tests.diagnostics.value_page.made_up_pages import rendered, training_batch
from tests.systems import system_config
from vapo.types import FinishReason, TrainingBatch

CSS = Path(__file__).parents[3] / "vapo/diagnostics/value_page/page.css"


def strengths(numbers: torch.Tensor, measure: dict[str, Any]) -> list[tuple[float, bool]]:
    """How strong each token's colour must be, and whether it is that of negative numbers."""
    low, high = measure["domain"]
    if measure["scale"] == "diverging":
        return [(min(1.0, abs(x) / high), x < 0) for x in numbers.tolist()]
    shares = [min(1.0, max(0.0, (x - low) / (high - low))) for x in numbers.tolist()]
    return [(1 - t if measure["strong"] == "low" else t, False) for t in shares]


def columns(batch: TrainingBatch) -> dict[str, torch.Tensor | None]:
    return {"value": batch.old_values, "advantage": batch.advantages, "logprob": batch.old_logprobs}


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("name", "max_tokens"),
    [
        ("value", 4),
        pytest.param("value", 1000, marks=pytest.mark.night),
        ("advantage", 1000),
        pytest.param("logprob", 1000, marks=pytest.mark.night),
    ],
)
def test_cards_are_the_batchs_rows(tmp_path: Path, name: str, max_tokens: int) -> None:
    """With 4 tokens, one a group, responses are cut."""
    config = system_config("vapo", f"value_pages.max_tokens={max_tokens}")
    batch = training_batch(config)
    page, data = rendered(batch, config)
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    numbers = columns(batch)[name]
    assert numbers is not None
    (measure,) = (m for m in data["measures"] if m["name"] == name)
    groups = drawn_groups(drawn(file, f"#{name}"))
    assert len(groups) == 4
    num_cut = 0
    for heading, facts, cards in groups:
        index = int(re.findall(r"^Group (\d+): ", heading)[0])
        verdicts = batch.is_correct[3 * index : 3 * index + 3].tolist()
        assert facts["prompt"] == f"made-up:{index}"
        assert facts["right"] == f"{sum(verdicts)} of 3"
        assert facts["shown"] == f"{len(cards)} of 3 responses"
        for card in cards:
            assert 3 * index <= card.row < 3 * index + 3
            is_right = bool(batch.is_correct[card.row])
            assert card.is_marked_right == is_right
            assert card.verdict == ("\u2713 right" if is_right else "\u2717 wrong")
            assert card.facts["reward"] == ("+1.00" if is_right else "\u22121.00")
            length = int(batch.response_lengths[card.row])
            assert card.facts["tokens"] == str(length)
            is_cut = batch.rollouts[card.row].finish_reason is FinishReason.LENGTH
            assert card.facts["end"] == ("cut at the budget" if is_cut else "stop")
            shown = len(card.tokens)
            left = f"{length - shown} more tokens are not on this page"
            assert card.remark.startswith(left) if shown < length else not card.remark
            num_cut += shown < length
            expected = strengths(numbers[card.row, :shown], measure)
            for (x, is_negative), (strength, is_below) in zip(card.tokens, expected, strict=True):
                assert x == pytest.approx(strength, abs=0.0051)
                assert is_negative == is_below
    assert (num_cut > 0) == (max_tokens == 4)


def test_negative_numbers_have_the_colour_of_the_scales_low_end() -> None:
    """Token and legend alike."""
    style = CSS.read_text(encoding="utf-8")
    ground = r"\{ background: color-mix\(in srgb, var\((--[\w-]+)\) calc"
    diverging = re.escape('[data-scale="diverging"]')
    assert re.findall(rf"{diverging} \.t {ground}", style) == ["--pos"]
    assert re.findall(rf"{diverging} \.t\.n {ground}", style) == ["--neg"]
    ramp = re.findall(rf"{diverging} #ramp .*?to right, (.*?)\);", style)
    assert ramp == ["var(--neg), var(--mid), var(--pos)"]
