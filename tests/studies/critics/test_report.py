"""Critics side by side: the numbers of the table, by hand."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from matplotlib import pyplot

from vapo.studies.critics.report import Curve, as_csv, figure, markdown, summarize

CURVES = [
    Curve("scalar", 0, ((0, 0, 0.0, -0.5), (4, 100, 1.0, 0.2), (8, 200, 2.0, 0.3)), 0.8),
    Curve("scalar", 1, ((0, 0, 0.0, -0.5), (4, 120, 2.0, 0.4), (8, 240, 4.0, 0.3)), 0.6),
    Curve("bins", 0, ((0, 0, 0.0, 0.0), (4, 100, 2.0, 0.5), (8, 200, 4.0, 0.2)), 0.8),
    Curve("bins", 1, ((0, 0, 0.0, 0.0), (4, 120, 4.0, 0.5), (8, 240, 8.0, 0.4)), 0.6),
    Curve("none", 0, ((0, 0, 0.0, -0.2), (4, 100, 1.0, -0.1), (8, 200, 2.0, -0.3)), 0.8),
]


def test_means_spreads_and_speeds() -> None:
    scalar, bins, none = summarize(CURVES, reference="scalar")
    assert (scalar.num_seeds, scalar.last, scalar.last_spread) == (2, pytest.approx(0.3), 0.0)
    assert scalar.best == pytest.approx(0.3)  # twice the same mean: the first is taken
    assert scalar.best_step == 4
    assert scalar.best_spread == pytest.approx(0.02**0.5)  # 0.2 and 0.4
    assert (scalar.best_tokens, scalar.nearly_tokens) == (110, 110)
    assert scalar.seconds == 3.0
    assert scalar.tokens_per_s == pytest.approx(440 / 6)
    assert (bins.best, bins.best_step, bins.best_tokens) == (0.5, 4, 110)
    assert bins.last == pytest.approx(0.3)
    assert bins.relative_speed == pytest.approx(0.5)
    assert none.nearly_tokens is None, "it never was above 0"
    assert scalar.oracle == pytest.approx(0.7)


def test_the_table_says_who_knows_most_and_what_is_near() -> None:
    table = summarize(CURVES, reference="scalar")
    text = markdown(table, reference="scalar")
    said = "bins knows most of those with several seeds: 0.500 ± 0.000 after 110 response tokens"
    assert f"{said}; the oracle 0.700." in text
    assert "Within" not in text, "0.3 + 0.141 is below 0.5"
    near = [*CURVES, Curve("near", 0, CURVES[2].points), Curve("near", 1, CURVES[3].points)]
    text = markdown(summarize(near, reference="scalar"), reference="scalar")
    assert "Within one standard deviation of it: near." in text
    rows = list(csv.DictReader(io.StringIO(as_csv(table))))
    assert [float(row["best"]) for row in rows] == [row.best for row in table]
    assert rows[2]["nearly_tokens"] == ""


def test_one_seed_has_no_spread_and_no_winner() -> None:
    table = summarize([c for c in CURVES if c.seed == 0], reference="scalar")
    text = markdown(table, reference="scalar")
    assert "±" not in text
    assert "knows most" not in text
    assert "| bins | 1 | 0.200 | 0.500 | 4 |" in text
    assert "One seed does not tell the critics apart: give several" in text
    rows = list(csv.DictReader(io.StringIO(as_csv(table))))
    assert [row["best_spread"] for row in rows] == ["", "", ""]
    drawn = figure([c for c in CURVES if c.seed == 0], reference="scalar")
    assert not drawn.axes[0].collections, "no band of a spread that is not known"
    pyplot.close(drawn)


def test_a_critic_with_one_seed_is_not_within_anothers_spread() -> None:
    one = Curve("one", 0, CURVES[2].points)
    text = markdown(summarize([*CURVES, one], reference="scalar"), reference="scalar")
    assert "| one | 1 | 0.200 | 0.500 | 4 |" in text
    assert "bins knows most of those with several seeds: 0.500 ± 0.000" in text
    assert "Within" not in text


def test_the_figure_has_a_line_for_each_critic_and_the_oracle() -> None:
    drawn = figure(CURVES, reference="scalar")
    lines = {line.get_label(): np.asarray(line.get_ydata()) for line in drawn.axes[0].get_lines()}
    pyplot.close(drawn)
    assert list(lines) == ["scalar", "bins", "none", "oracle"]
    assert list(lines["bins"]) == [0.0, 0.5, pytest.approx(0.3)]
    assert lines["oracle"][0] == pytest.approx(0.72), "the mean over all curves"
