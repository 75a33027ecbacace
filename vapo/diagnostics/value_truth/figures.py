"""Figures of how far the critic is from the true values, without the continuations' noise.

Each figure is a function of sums over prompts. Its interval is a bootstrap over prompts, so it
includes the noise of prompts, responses and continuations. With few prompts it covers less than 95
% (tests/diagnostics/test_truth_figures.py); correcting bias and skewness did not mend that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vapo.diagnostics.position_profiles import Profile
from vapo.diagnostics.value_truth.mistakes import (
    MistakesByMark,
    mistake_sums,
    mistakes_by_mark,
    pair_sums,
)
from vapo.diagnostics.value_truth.points import Outcomes, TruthPoint
from vapo.intervals import Bootstrap, Figure, Sums, share_interval

_POSITION_BINS = 10
_ROUNDING = 1e-9  # rounding may turn a variance of 0 into this share of the largest squared value


@dataclass(frozen=True)
class TruthFigures:
    """How a critic's values V compare with the true values T, in units of the reward.

    A figure that cannot be estimated is NaN. The figures up to `variance`, and `explained`, are
    over all prefixes. `between_variance` and `explained_between` are over the prompts, before the
    first token. All others are over responses that were continued from every step. A fall of T is
    clear if it is larger than the continuations' noise.

    Attributes:
        bias: the mean of V - T.
        mse: the mean of (V - T)^2.
        baseline_mse: the mse of the mean return of the prompt's other responses, in place of V.
        variance: the variance of T.
        within_variance: the variance of T within a response.
        between_variance: the variance of T between prompts.
        explained: 1 - Var(T - V) / Var(T).
        explained_within: `explained` for differences from a response's mean.
        explained_between: `explained` between prompts.
        flattening: the spread of V within a response / the spread of T.
        rank_agreement: the share of pairs of steps with clearly different T that V orders as T.
        mistake_precision: the share of the largest falls of V that are at a first clear fall of T.
            As many falls of V count as responses have a clear fall of T.
        mistake_recall: the share of responses with a clear fall of T in which V falls most at the
            first one.
        mistake_recall_ceiling: the share in which T falls most there, as far as continuations tell.
        by_position: a table with columns position, num_prefixes, truth_mean, value_mean, bias, mse.
        mistakes: the responses of `mistake_recall`, by whether they mark the mistake themselves.
    """

    num_prompts: int
    num_responses: int
    num_prefixes: int
    num_continuations: int
    num_mistakes: int
    bias: Figure
    mse: Figure
    baseline_mse: Figure
    variance: Figure
    within_variance: Figure
    between_variance: Figure
    explained: Figure
    explained_within: Figure
    explained_between: Figure
    flattening: Figure
    rank_agreement: Figure
    mistake_precision: Figure
    mistake_recall: Figure
    mistake_recall_ceiling: Figure
    by_position: Profile
    mistakes: MistakesByMark = field(default_factory=MistakesByMark)


def _share(bootstrap: Bootstrap, part: str, whole: str) -> Figure:
    """Estimate a share of responses, with the union of Wilson's interval and the bootstrap's.

    Wilson's interval takes responses as independent. The bootstrap's has no width if all prompts
    agree.

    Args:
        part, whole: the names of two sums, whose ratio is the share.
    """
    share = bootstrap.figure(lambda s: s[part] / s[whole])
    if share.is_unknown or not bootstrap.is_bounded:
        return share
    low, high = share_interval(round(bootstrap.totals[part]), round(bootstrap.totals[whole]))
    if share.is_bounded:
        low, high = min(low, share.low), max(high, share.high)
    return Figure(share.value, low, high)


def truth_figures(
    points: Sequence[TruthPoint],
    *,
    outcomes: Outcomes,
    seed: int,
    num_resamples: int = 1000,
) -> TruthFigures:
    """Estimate every figure with its interval, from states with at least two continuations each.

    Without a critic the states have no values, and the figures of V are NaN. A figure that divides
    by a variance is NaN, too, if that does not exceed the continuations' noise.

    Args:
        outcomes: the two possible returns; None if there are others.
        seed: the seed of the bootstrap over prompts, which has `num_resamples` resamples.
    """
    by_prompt: dict[str, list[TruthPoint]] = defaultdict(list)
    for point in points:
        by_prompt[point.prompt_id].append(point)
    responses = [steps_of_responses(group) for group in by_prompt.values()]
    table = _sums_of_prompts(list(by_prompt.values()), responses, outcomes, seed=seed)
    bootstrap = Bootstrap(table, len(by_prompt), seed, num_resamples)
    figure = bootstrap.figure
    least = _ROUNDING * float(np.square([point.mean for point in points]).max())

    def known(variance: Any, num: Any = 1) -> Any:
        """Return the variance, or NaN if it does not exceed the noise or is a rounding error."""
        return np.where(variance > least * num, variance, np.nan)

    def explained(truth: str, error: str, num: str) -> Figure:
        return figure(lambda s: 1 - _variance(s, error, num) / known(_variance(s, truth, num)))

    return TruthFigures(
        num_prompts=len(by_prompt),
        num_responses=sum(map(len, responses)),
        num_prefixes=len(points),
        num_continuations=len(points[0].returns),
        num_mistakes=int(bootstrap.totals["with_mistake"]),
        bias=figure(lambda s: s["v"] / s["n_v"] - s["t"] / s["n"]),
        mse=figure(lambda s: s["dd"] / s["n_v"]),
        baseline_mse=figure(lambda s: s["baseline_error"] / s["n_b"]),
        variance=figure(lambda s: _variance(s, "t", "n")),
        within_variance=figure(lambda s: s["within_t"] / s["within_n"]),
        between_variance=figure(lambda s: _variance(s, "t0", "prompts")),
        explained=explained("t", "d", "n"),
        explained_within=figure(lambda s: 1 - s["within_d"] / known(s["within_t"], s["within_n"])),
        explained_between=explained("t0", "d0", "prompts"),
        flattening=figure(lambda s: np.sqrt(s["within_v"] / known(s["within_t"], s["within_n"]))),
        rank_agreement=figure(lambda s: s["pairs_right"] / s["pairs"]),
        mistake_precision=_share(bootstrap, "named_right", "named"),
        mistake_recall=_share(bootstrap, "found", "with_mistake"),
        mistake_recall_ceiling=figure(lambda s: s["found_by_exact"] / s["with_mistake"]),
        by_position=_by_position(points),
        mistakes=mistakes_by_mark(responses, outcomes),
    )


def steps_of_responses(points: Sequence[TruthPoint]) -> list[list[TruthPoint]]:
    """Return the measured states of each response that was continued from every step, in order.

    Responses that were continued from single prefixes only are left out.
    """
    rows: dict[int, list[TruthPoint]] = defaultdict(list)
    for point in points:
        if point.is_of_steps:
            rows[point.row].append(point)
    return [sorted(row, key=lambda point: point.num_tokens) for row in rows.values()]


def _sums_of_prompts(
    prompts: Sequence[Sequence[TruthPoint]],
    responses: Sequence[Sequence[Sequence[TruthPoint]]],
    outcomes: Outcomes,
    *,
    seed: int,
) -> dict[str, Any]:
    """Return the name of each sum -> an array with a number for each prompt."""
    falls = mistake_sums(responses, outcomes, seed=seed)
    rows = [
        _all_sums(group)
        | _within_sums(steps)
        | _prompt_sums(group)
        | pair_sums(steps, outcomes)
        | fall_sums
        for group, steps, fall_sums in zip(prompts, responses, falls, strict=True)
    ]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _variance(s: Sums, name: str, num: str) -> Any:
    """Return the variance of some numbers, from sums.

    Args:
        s: under `num` how many numbers there are, under `name` their sum, and under `name` written
            twice the sum of their squares.
    """
    return s[name * 2] / s[num] - (s[name] / s[num]) ** 2


def _columns(points: Sequence[TruthPoint]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays of true values, the critic's values (NaN without one), and noise of true
    values.
    """
    rows = [(p.mean, math.nan if p.value is None else p.value, p.noise) for p in points]
    t, v, noise = np.array(rows, dtype=float).T.copy()
    return t, v, noise


def _all_sums(points: Sequence[TruthPoint]) -> dict[str, float]:
    """Return sums over all measured prefixes of a prompt.

    t is a true value, v the critic's value, d is t - v, and tt and dd are squares. A true value is
    a mean of K returns, so its noise is subtracted from each square. "n_v" counts the critic's
    values and is NaN without them, "n_b" the baselines.
    """
    t, v, noise = _columns(points)
    with_baseline = [i for i, point in enumerate(points) if point.baseline is not None]
    b = np.array([points[i].baseline for i in with_baseline], dtype=float)
    return {
        "n": len(points),
        "n_v": float(np.isfinite(v).sum()) or math.nan,
        "t": t.sum(),
        "tt": (t**2 - noise).sum(),
        "v": v.sum(),
        "d": (t - v).sum(),
        "dd": ((t - v) ** 2 - noise).sum(),
        "n_b": len(with_baseline),
        "baseline_error": ((b - t[with_baseline]) ** 2 - noise[with_baseline]).sum(),
    }


def _within_sums(responses: Sequence[Sequence[TruthPoint]]) -> dict[str, float]:
    """Return sums of squared differences from each response's mean, without the continuations'
    noise. A response with a single measured state adds nothing.

    "within_t" is of the true values, "within_v" of the critic's, and "within_d" of the true values
    less the critic's. "within_n" counts the independent differences, n - 1 of n.
    """
    sums = dict.fromkeys(("within_n", "within_t", "within_v", "within_d"), 0.0)
    for steps in responses:
        if len(steps) < 2:
            continue
        t, v, noises = _columns(steps)
        noise = sum(noises.tolist()) * (1 - 1 / len(steps))
        sums["within_n"] += len(steps) - 1
        sums["within_t"] += len(t) * t.var() - noise
        sums["within_v"] += len(t) * v.var()
        sums["within_d"] += len(t) * (t - v).var() - noise
    return sums


def _prompt_sums(points: Sequence[TruthPoint]) -> dict[str, float]:
    """Return the sums of the prompt's own state, before the first token of any response.

    t0 is its true value and d0 that less the critic's; their squares are without noise. All are 0
    if that state was not measured.
    """
    first = next((point for point in points if point.num_tokens == 0), None)
    if first is None:
        return dict.fromkeys(("prompts", "t0", "t0t0", "d0", "d0d0"), 0.0)
    t, noise = first.mean, first.noise
    d = math.nan if first.value is None else t - first.value
    return {"prompts": 1, "t0": t, "t0t0": t * t - noise, "d0": d, "d0d0": d * d - noise}


def _by_position(points: Sequence[TruthPoint]) -> Profile:
    """Return a table of means over prefixes whose position is in the same tenth of their
    response.

    A tenth without prefixes has no row. A mean that is unknown is None.
    """
    bins: dict[int, list[TruthPoint]] = defaultdict(list)
    for point in points:
        bins[min(int(point.position * _POSITION_BINS), _POSITION_BINS - 1)].append(point)
    rows = []
    for number, inside in sorted(bins.items()):
        s = _all_sums(inside)
        truth, value, mse = (s[name] / s["n"] for name in ("t", "v", "dd"))
        row = ((number + 0.5) / _POSITION_BINS, len(inside), truth, value, value - truth, mse)
        rows.append([None if math.isnan(x) else x for x in row])
    names = ("position", "num_prefixes", "truth_mean", "value_mean", "bias", "mse")
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
