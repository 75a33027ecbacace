"""The pooled differences of experiments/ablation/README.md are what their script computes."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ABLATION = ROOT / "experiments/ablation"
SIZES = [ABLATION / name / "table.csv" for name in ("missed_checks", "longer_missed_checks")]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ABLATION))
    return import_module("pooled")


def test_inverse_variances_by_hand(script: ModuleType) -> None:
    """Variances 1 and 3: weights 3/4 and 1/4, mean -3/4 * 2 = -1.5; 1/W = 0.75. Meier's factor
    1 + 4 (3/16 / 4 + 3/16 / 7) = 1.294643; degrees 1 / (9/16 / 4 + 1/16 / 7) = 6.686567;
    t(0.975, 6.686567) = 2.387365. Q = 1 (0.5)^2 + 1/3 (1.5)^2 = 1."""
    found = script.pool([script.Difference(-2, 1, 4), script.Difference(0, 3, 7)])
    assert found.mean == pytest.approx(-1.5)
    half = 2.387365 * math.sqrt(0.75 * 1.294643)
    assert found.high - found.mean == pytest.approx(half, rel=2e-3)
    assert found.p == pytest.approx(0.317311, abs=1e-6)  # of chi^2 with one degree above 1


def test_a_row_that_collapses_is_not_pooled(script: ModuleType) -> None:
    steady, split = script.Difference(-2, 1, 4), script.Difference(-20, 25, 4)
    text = script.table([{"a": steady, "b": split, "c": steady}, {"a": steady, "b": steady}])
    assert "| b | not pooled: seeds collapse |  |" in text
    assert "| a | -2.0 [" in text
    assert "| c |" not in text, "only one size has it"


def test_the_page_has_every_pooled_row(script: ModuleType) -> None:
    text = script.table([script.differences(path) for path in SIZES])
    assert text == (ABLATION / "pooled.md").read_text()
    assert text in (ABLATION / "README.md").read_text()
    assert len(text.splitlines()) == 2 + 12
