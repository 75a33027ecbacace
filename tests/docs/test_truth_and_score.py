"""What experiments/critics/README.md says of figures and scores is what its script prints."""

from __future__ import annotations

import csv
import math
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments/critics/truth_and_score"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    found = import_module("truth_and_score")
    monkeypatch.setattr(found, "NUM_PAIRINGS", 1999)
    return found


def test_equal_methods_are_one(script: ModuleType) -> None:
    methods = script.distinct(script.read(FOLDER / "methods.csv"))
    assert len(methods) == 11
    assert [m.name for m in methods if "VAPO" in m.name] == ["EVPO = VAPO"]


def test_p_is_of_pairings_of_methods(script: ModuleType) -> None:
    """Of the 24 orders of four, two correlate as far from 0 as a perfect one."""
    methods = [
        script.Method(f"m{n}", 10.0 * n, dict.fromkeys(script.FIGURES, n**2)) for n in range(4)
    ]
    found = script.correlation(methods, "truth/mse")
    assert found.rho == pytest.approx(1)
    assert found.p == pytest.approx(2 / 24)
    assert script.largest(methods, list(script.FIGURES)).p == pytest.approx(2 / 24)


def test_the_method_that_decides_is_found(script: ModuleType) -> None:
    """Nine without a relation, and one that is lowest in both."""
    scores, figures = (5, 1, 4, 2, 3, -9), (2, 2.5, 1, 3, 4, -9)
    methods = [
        script.Method(f"m{n}", score, dict.fromkeys(script.FIGURES, figure))
        for n, (score, figure) in enumerate(zip(scores, figures, strict=True))
    ]
    left_out = script.most_influential(methods, "truth/mse")
    assert left_out.name == "m5"
    rest = [method for method in methods if method is not left_out]
    assert script.correlation(rest, "truth/mse").rho < script.correlation(methods, "truth/mse").rho


def test_the_page_has_the_printed_correlations(script: ModuleType) -> None:
    page = (ROOT / "experiments/critics/README.md").read_text()
    printed = (FOLDER / "table.md").read_text()
    rows = [line for line in printed.splitlines() if "(p " in line]
    assert len(rows) == len(script.FIGURES)
    for line in rows:
        assert line in page
    for line in script.table(script.read(FOLDER / "methods.csv")).splitlines():
        if "(p " in line:  # with fewer pairings p differs a little
            kept = [cell for cell in line.split("|") if "(p " not in cell]
            assert any([c for c in row.split("|") if "(p " not in c] == kept for row in rows)


def test_hl_gauss_is_the_worst_by_eight_figures(script: ModuleType) -> None:
    with (FOLDER / "methods.csv").open() as file:
        rows = {row.pop("method"): row for row in csv.DictReader(file)}
    worst = 0
    for key in script.FIGURES:
        distance = {
            name: float(row[key]) if key == "truth/mse" else abs(float(row[key]))
            for name, row in rows.items()
        }
        bad = max if key in ("truth/mse", "truth/bias") else min
        worst += math.isclose(distance["HL-Gauss"], bad(distance.values()))
    assert worst == 8
    assert (
        "the worst by eight of the ten figures"
        in (ROOT / "experiments/critics/README.md").read_text()
    )
