"""The table and the figure of `vapo gates`: what stands in them, and how wide they are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

from tests.studies.gates.test_rules import PAPER
from vapo.studies.gates.report import console_text, figure, markdown
from vapo.studies.gates.rules import GateCurves, Interval, judge

CURVES = GateCurves(
    explained_variance=(-0.9, 0.1, 0.4),
    value_pretraining=(-0.9, -0.4, -0.2),
    value_unlearning=(-0.9, -0.8, -0.45),
    response_length=(400.0, 300.0, 190.0),
)
FIGURES = replace(PAPER, unlearned_after=2, unlearned_between=(1, 3), collapsed_after=2)


def test_the_console_fits_its_columns() -> None:
    unknown = replace(
        FIGURES,
        guess=Interval(-0.5, -math.inf, math.inf),
        explained_variance_pretrained=math.nan,
        horizon_constant=math.inf,
        mean_length=123456.7,
        unlearned_after=None,
        unlearned_between=(None, None),
        collapsed_after=None,
        value_pretrained=None,
    )
    for figures in (FIGURES, unknown, replace(FIGURES, guess=None)):
        text = console_text(figures, judge(figures))
        assert max(map(len, text.splitlines())) <= 96
    assert "0.400, 80 % of an oracle's 0.500" in console_text(FIGURES, judge(FIGURES))
    assert "-0.500 [-0.600, -0.400]" in console_text(FIGURES, judge(FIGURES))
    assert "2 iterations [1, 3]" in console_text(FIGURES, judge(FIGURES))
    assert console_text(replace(FIGURES, guess=None), judge(FIGURES)).count("not measured") == 2


def test_the_page_has_every_verdict_with_its_reasons() -> None:
    gates = judge(replace(FIGURES, clip_fraction_high=0.001))
    page = markdown(FIGURES, gates, about=["of a test"])
    assert "- of a test\n" in page
    for gate in gates:
        assert f"| {gate.component} | **{gate.word}** | {'; '.join(gate.reasons)} |" in page
    assert "| clip-higher | **cannot show** | 0.10 % of the tokens" in page


def lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))  # type: ignore
        for line in axes.get_lines()
    }


def test_the_figure_draws_the_curves_and_what_they_are_measured_by() -> None:
    drawn = figure(FIGURES, CURVES)
    knowledge, middle, length = map(lines, drawn.axes)
    (band,) = drawn.axes[1].patches
    corners = np.asarray(band.get_path().transformed(band.get_patch_transform()).vertices)
    assert sorted(set(corners[:, 1].tolist())) == [-0.6, -0.4]
    pyplot.close(drawn)
    assert knowledge["critic"] == ([0, 1, 2], [-0.9, 0.1, 0.4])
    assert knowledge["oracle"][1] == [0.5, 0.5]
    assert middle["value pretraining"][1] == [-0.9, -0.4, -0.2]
    assert middle["the critic alone"] == ([0, 1, 2], [-0.9, -0.8, -0.45])
    assert (middle["going on"][1][0], middle["a guess"][1][0]) == (-0.2, -0.5)
    assert middle["T_unlearn, 2"][0] == [2, 2]
    assert length["the policy alone"][1] == [400.0, 300.0, 190.0]
    assert length["half of the start"][1] == [190.0, 190.0]
    assert length["T_collapse, 2"][0] == [2, 2]


def test_what_was_not_measured_is_not_drawn() -> None:
    figures = replace(FIGURES, guess=None, explained_variance_oracle=None, collapsed_after=None)
    drawn = figure(figures, replace(CURVES, value_unlearning=()))
    knowledge, middle, length = map(lines, drawn.axes)
    pyplot.close(drawn)
    assert set(knowledge) == {"critic"}
    assert set(middle) == {"value pretraining", "going on"}
    assert set(length) == {"the policy alone", "half of the start"}
