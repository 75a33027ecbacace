"""Figures of the value truth against exact values, on episodes whose chances are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from random import Random
from statistics import fmean, stdev

import numpy as np
import pytest

from vapo.diagnostics.value_truth.figures import TruthFigures, truth_figures
from vapo.diagnostics.value_truth.points import TruthPoint, true_value_interval
from vapo.diagnostics.value_truth.verdict import verdict
from vapo.intervals import Figure
from vapo.rollouts.continuations import MeasuredState

OUTCOMES = (-1.0, 1.0)
STEPS = 8
NAMES = [f.name for f in fields(TruthFigures) if f.type == "Figure"]


def chances(rng: Random, hazard: float) -> list[float]:
    """The chance of success before each step, where a step may fail for good.

    After a failure 5 % of the responses are right all the same.
    """
    found, failed = [], False
    for step in range(STEPS):
        left = (1 - hazard) ** (STEPS - step)
        found.append(0.05 if failed else left + 0.05 * (1 - left))
        failed = failed or rng.random() < hazard
    return found


Critic = Callable[[float, float], float]  # of a state's exact value, and of its prompt's


@cache
def episodes(num_prompts: int = 60, seed: int = 0) -> list[list[float]]:
    """The exact values of three responses to each prompt, at each step."""
    rng = Random(seed)
    hazards = [rng.choice((0.02, 0.1, 0.3)) for _ in range(num_prompts)]
    return [[2 * p - 1 for p in chances(rng, h)] for h in hazards for _ in range(3)]


def points_of(
    k: int | None, critic: Critic, seed: int = 0, *, of: list[list[float]] | None = None
) -> list[TruthPoint]:
    """Points with K draws each, None: their exact values.

    The responses to a prompt share those of the prompt itself.
    """
    draws, points = np.random.default_rng(seed), []
    first: tuple[float, ...] = ()
    for row, values in enumerate(episodes() if of is None else of):
        for place, value in enumerate(values):
            returns: tuple[float, ...] = (value, value)
            if k is not None:
                returns = tuple(2.0 * draws.binomial(1, (value + 1) / 2, size=k) - 1)
            if place == 0:
                first = returns = returns if row % 3 == 0 else first
            v = critic(value, values[0])
            points.append(TruthPoint(row, place, returns, str(row // 3), STEPS, v, values[0]))
    return points


def exact(critic: Critic, of: list[list[float]] | None = None) -> TruthFigures:
    """The figures where each prefix's continuations all earn its exact value."""
    return truth_figures(points_of(None, critic, of=of), outcomes=None, seed=0, num_resamples=2)


def flat(value: float, prompts_value: float) -> float:
    return 0.3 * value + 0.1


@cache
def many(k: int) -> tuple[TruthFigures, ...]:
    return tuple(
        truth_figures(points_of(k, flat, seed), outcomes=OUTCOMES, seed=0, num_resamples=2)
        for seed in range(24)
    )


@pytest.mark.slow
@pytest.mark.parametrize("k", [4, *(pytest.param(k, marks=pytest.mark.night) for k in (8, 16))])
@pytest.mark.parametrize(
    "name",
    ["bias", "mse", "baseline_mse", "variance", "within_variance", "between_variance", "explained",
     "explained_within", "explained_between", "flattening"],
)  # fmt: skip
def test_the_noise_of_k_continuations_is_not_the_critics_error(k: int, name: str) -> None:
    """The mean over 24 draws is the exact figure, within 3.5 standard errors and 4 %."""
    values = [getattr(figures, name).value for figures in many(k)]
    wanted = getattr(exact(flat), name).value
    error = stdev(values) / math.sqrt(len(values))
    assert abs(fmean(values) - wanted) < 3.5 * error
    assert abs(fmean(values) - wanted) < 0.04 * abs(wanted)


def test_without_the_correction_it_would_be() -> None:
    points = points_of(4, flat)
    naive = fmean(((point.value or 0.0) - point.mean) ** 2 for point in points)
    found = truth_figures(points, outcomes=OUTCOMES, seed=0)
    assert naive > found.mse.high
    assert found.mse.low < exact(flat).mse.value < found.mse.high


@pytest.mark.night
def test_the_intervals_cover() -> None:
    """Of 30 draws of 64 prompts, each figure's intervals cover that of all prompts 25 times."""
    names = ("bias", "mse", "explained_within", "explained_between", "flattening")
    all_prompts = exact(flat, of=episodes(1000, 12345))
    covered = dict.fromkeys(names, 0)
    for seed in range(30):
        points = points_of(8, flat, seed, of=episodes(64, seed))
        figures = truth_figures(points, outcomes=OUTCOMES, seed=seed, num_resamples=100)
        for name in names:
            _, low, high = getattr(figures, name)
            covered[name] += low <= getattr(all_prompts, name).value <= high
    assert min(covered.values()) >= 25, covered


class TestCriticsOfKnownKinds:
    def figures(self, critic: Critic) -> TruthFigures:
        return truth_figures(points_of(16, critic), outcomes=OUTCOMES, seed=0)

    def test_exact(self) -> None:
        found = self.figures(lambda value, prompts_value: value)
        assert abs(found.mse.value) < 0.01
        assert abs(found.bias.value) < 0.02
        for name in ("explained_within", "explained_between", "flattening"):
            value, low, high = getattr(found, name)
            assert low <= 1 <= high
            assert value == pytest.approx(1, abs=0.06)
        assert found.rank_agreement.value > 0.98
        assert found.mistake_recall.value > 0.95
        assert found.mse.high < found.baseline_mse.low

    def test_shifted(self) -> None:
        shifted = self.figures(lambda value, prompts_value: value + 0.5)
        assert shifted.bias.value == pytest.approx(0.5, abs=0.02)
        assert shifted.mse.value == pytest.approx(0.25, abs=0.03)
        assert shifted.explained_within.low <= 1 <= shifted.explained_within.high
        assert shifted.explained_within.value > 0.94

    def test_a_tenth_of_the_spread(self) -> None:
        found = self.figures(lambda value, prompts_value: prompts_value + 0.1 * value)
        assert found.flattening.value == pytest.approx(0.1, abs=0.01)
        assert found.explained_within.value == pytest.approx(1 - 0.9**2, abs=0.02)

    def test_the_prompts_mean(self) -> None:
        found = self.figures(lambda value, prompts_value: prompts_value)
        assert found.flattening.value == 0
        assert found.explained_within.value == pytest.approx(0, abs=1e-9)
        assert found.explained_between.value == pytest.approx(1, abs=0.05)
        assert found.rank_agreement.value == 0.5
        assert found.mistake_recall.value == 0
        assert found.mse.value == pytest.approx(found.baseline_mse.value)

    def test_none(self) -> None:
        points = [replace(p, value=None) for p in points_of(8, flat)]
        found = truth_figures(points, outcomes=OUTCOMES, seed=0)
        assert math.isnan(found.mse.value)
        assert math.isnan(found.flattening.value)
        assert math.isnan(found.explained.value)
        assert found.variance.value > 0.1
        assert found.by_position["value_mean"] == [None] * len(found.by_position["position"])


@pytest.mark.parametrize(
    ("critic", "wanted", "unwanted"),
    [
        (lambda v, p: v, {"truth-follows", "truth-centred"}, {"truth-flat", "truth-shifted"}),
        (lambda v, p: v + 0.5, {"truth-follows", "truth-shifted"}, {"truth-centred"}),
        (lambda v, p: 0.9 * p + 0.1 * v, {"truth-prompt-only"}, {"truth-follows"}),
        (lambda v, p: p, {"truth-prompt-only", "truth-mistakes-missed"}, {"truth-follows"}),
        (lambda v, p: 0.0, {"truth-nothing", "truth-mistakes-missed"}, {"truth-prompt-only"}),
        (lambda v, p: 2 * v, {"truth-extreme"}, {"truth-follows", "truth-flat"}),
    ],
    ids=["exact", "shifted", "flat", "the prompt's mean", "a constant", "too extreme"],
)
def test_the_verdict_names_the_critic(critic: Critic, wanted: set[str], unwanted: set[str]) -> None:
    """From returns to words; 300 prompts, so that the intervals lie on one side."""
    points = points_of(16, critic, of=episodes(300))
    remarks = verdict(truth_figures(points, outcomes=OUTCOMES, seed=0, num_resamples=200))
    anchors = {remark.anchor for remark in remarks}
    assert wanted <= anchors
    assert not unwanted & anchors


@pytest.mark.slow
@pytest.mark.parametrize("k", [4, *(pytest.param(k, marks=pytest.mark.night) for k in (8, 16, 32))])
def test_the_ceiling_is_what_an_exact_critic_has(k: int) -> None:
    """Over 12 draws of 180 responses; an exact critic misses mistakes too, with few draws most."""
    drawn = [points_of(k, lambda value, prompts_value: value, seed) for seed in range(12)]
    found = [truth_figures(p, outcomes=OUTCOMES, seed=0, num_resamples=2) for p in drawn]
    exact_recall = fmean(f.mistake_recall.value for f in found)
    ceiling = fmean(f.mistake_recall_ceiling.value for f in found)
    assert exact_recall < 0.99
    assert ceiling == pytest.approx(exact_recall, abs=0.03)
    blind = [[replace(point, value=0.0) for point in points] for points in drawn[:2]]
    for points, own in zip(blind, found, strict=False):
        figures = truth_figures(points, outcomes=OUTCOMES, seed=0, num_resamples=2)
        assert figures.mistake_recall.value == 0
        assert figures.mistake_recall_ceiling.value == own.mistake_recall_ceiling.value


def test_the_ceiling_of_other_returns() -> None:
    """Normal returns: one large fall, the smaller ones of which noise makes the first at times."""
    rng, points = np.random.default_rng(3), []
    for row in range(400):
        means = [0.0, 0.0, -0.9, -0.9, -2.4, -2.4]
        for place, mean in enumerate(means):
            drawn = tuple(rng.normal(mean, 1, size=8))
            points.append(TruthPoint(row, place, drawn, f"p{row}", 6, value=mean))
    found = truth_figures(points, outcomes=None, seed=0, num_resamples=2)
    hits = found.mistake_recall.value
    assert 0.5 < hits < 0.95
    assert found.mistake_recall_ceiling.value == pytest.approx(hits, abs=0.1)


def test_four_of_four_mistakes_are_not_certain() -> None:
    """Wilson's interval for 4 of 4 is [0.51, 1]; a bootstrap of four successes has no width."""
    right, wrong = (1.0,) * 8, (-1.0,) * 8
    points = [
        TruthPoint(row, place, (right, wrong)[place], f"p{row}", 2, value=1.0 - place)
        for row in range(4)
        for place in range(2)
    ]
    found = truth_figures(points, outcomes=OUTCOMES, seed=0)
    assert found.num_mistakes == 4
    for figure in (found.mistake_recall, found.mistake_precision):
        assert figure.value == 1
        assert figure.low == pytest.approx(0.5101, abs=1e-4)
        assert figure.high == 1


def test_mistakes_without_a_critic_are_not_missed_by_it() -> None:
    points = [replace(p, value=None) for p in points_of(8, flat)]
    found = truth_figures(points, outcomes=OUTCOMES, seed=0)
    assert found.num_mistakes > 20
    assert math.isnan(found.mistake_recall.value)
    assert math.isnan(found.mistake_precision.value)


@pytest.mark.parametrize("level", [0.3, -0.1, 1e3])
def test_what_rounding_leaves_of_equal_truths_is_no_variance(level: float) -> None:
    """0.1 + 0.2 - 0.3 is not 0: a critic's error over such a variance is not a figure."""
    spread = (level - 0.1, level + 0.2, level - 0.1)
    points = [
        TruthPoint(row, place, spread, f"p{row}", 3, value=0.01 * row * place)
        for row in range(6)
        for place in range(3)
    ]
    for returns in (spread, (level,) * 3):
        own = [replace(point, returns=returns) for point in points]
        found = truth_figures(own, outcomes=None, seed=0)
        for name in ("explained", "explained_within", "explained_between", "flattening"):
            assert math.isnan(getattr(found, name).value), (name, getattr(found, name))


def test_positions_are_tenths_of_the_response() -> None:
    returns = (1.0, -1.0)
    points = [TruthPoint(0, n, returns, "a", 20, value=0.25) for n in (0, 1, 2, 19)]
    table = truth_figures(points, outcomes=OUTCOMES, seed=0, num_resamples=2).by_position
    assert table["position"] == [0.05, 0.15, 0.95]
    assert table["num_prefixes"] == [2, 1, 1]
    assert table["bias"] == [0.25, 0.25, 0.25]
    assert table["mse"] == [0.25**2 - 1] * 3  # the noise of two draws that differ is 1


def test_two_prompts_say_nothing_of_their_spread() -> None:
    found = truth_figures(points_of(4, flat, of=episodes(2)), outcomes=OUTCOMES, seed=0)
    assert found.mse == Figure(found.mse.value, -math.inf, math.inf)


def test_where_the_truth_hardly_moves_the_interval_has_no_limits() -> None:
    """Equal values at every step: in many resamples the noise eats the variance within."""
    still = [[0.0] * STEPS for _ in range(3 * 20)]
    found = [
        truth_figures(points_of(4, flat, seed, of=still), outcomes=OUTCOMES, seed=0)
        for seed in range(6)
    ]
    known = [f.flattening for f in found if not math.isnan(f.flattening.value)]
    assert known
    assert all((low, high) == (-math.inf, math.inf) for _, low, high in known)
    assert all(math.isfinite(f.within_variance.low) for f in found)


@pytest.mark.parametrize("k", [4, 8, 16])
def test_other_returns_have_students_interval(k: int) -> None:
    """Normal returns around known means: 93 % or more of 1,000 are covered, with 4 draws too."""
    rng = np.random.default_rng(k)
    covered = 0
    for mean in rng.normal(size=1000):
        state = MeasuredState(0, 0, tuple(rng.normal(mean, 1, size=k)))
        low, high = true_value_interval(state, None, spread=1.0)
        covered += low <= mean <= high
    assert 930 <= covered <= 990


def test_equal_returns_are_not_certain() -> None:
    state = MeasuredState(0, 0, (1.0,) * 4)
    assert true_value_interval(state, (-1.0, 1.0), spread=0.5)[0] < 0.1
    assert true_value_interval(state, None, spread=0.5)[0] < 0.9
