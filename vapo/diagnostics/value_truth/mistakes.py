"""Find the steps at which a response loses value: by its true values, and by the critic's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from vapo.diagnostics.value_truth.points import Outcomes, TruthPoint

_LEVEL = 0.05  # the chance that a response without any mistake gets one
_DRAWS = 200  # draws of a response's true values, for the share that an exact critic finds
_LEAST_STRENGTH = 0.1  # the prior counts as this many returns if all measured values are extreme

Responses = Sequence[Sequence[TruthPoint]]  # the steps of each response, in order


@dataclass(frozen=True)
class MistakeCount:
    """How often the critic finds mistakes.

    A mistake is the first step of a response at which the true value clearly falls.

    Attributes:
        found: at how many of the mistakes the critic's value falls most.
        num: the number of mistakes.
    """

    found: int = 0
    num: int = 0

    def __str__(self) -> str:
        return f"{self.found} of {self.num}"


@dataclass(frozen=True)
class MistakesByMark:
    """Counts of first mistakes, by what the response itself says of the step.

    In some tasks a response checks its own steps. A critic that has learned to read the checks
    finds marked mistakes without seeing the mistake itself. Only unmarked and unchecked mistakes
    show that it sees the step.

    Attributes:
        marked: the check calls the step wrong.
        unmarked: the check calls the step right.
        unchecked: no check follows the step.
    """

    marked: MistakeCount = MistakeCount()
    unmarked: MistakeCount = MistakeCount()
    unchecked: MistakeCount = MistakeCount()

    def __str__(self) -> str:
        if self.marked.num + self.unmarked.num == 0:
            return "the task does not tell whether responses mark their mistakes themselves"
        unchecked = f", {self.unchecked} without a check" if self.unchecked.num else ""
        return f"{self.marked} that the response marks itself, {self.unmarked} unmarked{unchecked}"


def difference_in_errors(earlier: TruthPoint, later: TruthPoint, outcomes: Outcomes) -> float:
    """Return the true value's rise from one point to a later one, in standard errors.

    K equal returns must have an error, too. Therefore returns with two outcomes get one more of
    each (Agresti and Caffo 2000); for others the mean variance of both points counts as one more
    draw. If the error is 0 even so, the result is infinite, or 0 for equal true values.

    Args:
        outcomes: the two possible returns; None if there are others.
    """
    pooled = fmean([earlier.noise * len(earlier.returns), later.noise * len(later.returns)])
    means, squared_error = [], 0.0
    for point in (earlier, later):
        num, mean = len(point.returns), point.mean
        if outcomes is not None:
            num, mean = num + 2, (num * mean + sum(outcomes)) / (num + 2)
            variance = (mean - outcomes[0]) * (outcomes[1] - mean)
        else:
            variance = ((num - 1) * point.noise * num + pooled) / num
        means.append(mean)
        squared_error += variance / num
    error, rise = math.sqrt(squared_error), means[1] - means[0]
    return rise / error if error > 0 else math.copysign(math.inf, rise) if rise else 0.0


def first_clear_fall(steps: Sequence[TruthPoint], outcomes: Outcomes) -> int | None:
    """Return the index of the point before the first step that clearly lost value, or None.

    None means that no step clearly lost value. Each of n steps is tested one-sided at a level of
    0.05 / n.
    """
    if len(steps) < 2:
        return None
    bound = NormalDist().inv_cdf(_LEVEL / (len(steps) - 1))
    for place, (earlier, later) in enumerate(pairwise(steps)):
        if difference_in_errors(earlier, later, outcomes) < bound:
            return place
    return None


def largest_fall(steps: Sequence[TruthPoint]) -> tuple[int, float] | None:
    """Return the index of the point after which the critic's value falls most, and by how much.

    The first of several equal falls counts. None if the value never falls, or is not known.
    """
    falls = [
        (earlier.value - later.value, -place)
        for place, (earlier, later) in enumerate(pairwise(steps))
        if earlier.value is not None and later.value is not None and earlier.value > later.value
    ]
    fall, place = max(falls, default=(0.0, 0))
    return (-place, fall) if falls else None


def mistakes_by_mark(prompts: Sequence[Responses], outcomes: Outcomes) -> MistakesByMark:
    """Count the responses whose true value clearly falls, by what they say of that step.

    Such a first mistake is found if the critic's value falls most at the same step.
    """
    counts_by_mark = {True: [0, 0], False: [0, 0], None: [0, 0]}  # in the order of the fields
    for steps in chain(*prompts):
        place, fall = first_clear_fall(steps, outcomes), largest_fall(steps)
        if place is not None:
            counts = counts_by_mark[steps[place + 1].is_marked]
            counts[0] += fall is not None and fall[0] == place
            counts[1] += 1
    return MistakesByMark(*(MistakeCount(*counts) for counts in counts_by_mark.values()))


def mistake_sums(
    prompts: Sequence[Responses], outcomes: Outcomes, *, seed: int = 0
) -> list[dict[str, float]]:
    """Return for each prompt counts of its responses.

    - with_mistake: responses whose true value clearly falls.
    - found: responses with a mistake at whose first clear fall the critic's value falls most.
    - found_by_exact: how many mistakes an exact critic would find, on average.
    - named: responses whose largest fall of the critic's value is among the N largest of all
      prompts. N is the number of all responses with a mistake.
    - named_right: named responses whose largest fall is at the first clear fall of the true value.

    Without values `found` is NaN and none are named.
    """
    falls = [
        [(first_clear_fall(steps, outcomes), largest_fall(steps)) for steps in responses]
        for responses in prompts
    ]
    all_falls = list(chain(*falls))
    num = sum(place is not None for place, _ in all_falls)
    sizes = sorted((fall[1] for _, fall in all_falls if fall is not None), reverse=True)
    least = sizes[min(num, len(sizes)) - 1] if num and sizes else math.inf
    points = [point for responses in prompts for steps in responses for point in steps]
    has_values, prior = any(p.value is not None for p in points), _prior(points) if num else None
    draws, rows = np.random.default_rng(seed), []
    for responses, response_falls in zip(prompts, falls, strict=True):
        is_right = [fall is not None and fall[0] == place for place, fall in response_falls]
        is_named = [fall is not None and fall[1] >= least for _, fall in response_falls]
        by_exact = 0.0
        for steps, (place, _) in zip(responses, response_falls, strict=True):
            if place is not None and prior is not None:
                values = _draw_values(steps, prior, outcomes, draws)
                drops = values[:, :-1] - values[:, 1:]
                by_exact += float((drops.argmax(axis=1) == place).mean())
        rows.append(
            {
                "with_mistake": float(sum(place is not None for place, _ in response_falls)),
                "found": float(sum(is_right)) if has_values else math.nan,
                "found_by_exact": by_exact,
                "named": float(sum(is_named)),
                "named_right": float(sum(map(min, is_right, is_named))),
            }
        )
    return rows


class _Prior(NamedTuple):
    """The prior of a true value: mean and variance of the true values of all points.

    `pooled` is the mean variance of the returns from a point.
    """

    mean: float
    variance: float
    pooled: float


def _prior(points: Sequence[TruthPoint]) -> _Prior:
    """Estimate the prior from the measured values. Their noise is subtracted from the variance.

    At least a millionth of the variance remains.
    """
    means, noises = np.array([(point.mean, point.noise) for point in points]).T.copy()
    variance = max(means.var() - noises.mean(), 1e-6 * means.var())
    pooled = np.mean([point.noise * len(point.returns) for point in points])
    return _Prior(means.mean(), variance, float(pooled))


def _draw_values(
    steps: Sequence[TruthPoint], prior: _Prior, outcomes: Outcomes, draws: np.random.Generator
) -> Float[np.ndarray, "D S"]:
    """Draw true values of a response's steps from their posteriors, given the K returns of each.

    The result is [draws, steps]. The prior is Beta for two outcomes, else normal. Steps are drawn
    independently, so if several falls of a response are equal in truth, the draws fall most at the
    first clear one too rarely.
    """
    rows = [(len(p.returns), p.mean, p.noise) for p in steps]
    num, means, noises = np.array(rows).T.copy()
    size = (_DRAWS, len(steps))
    if outcomes is not None:
        worst, best = outcomes
        share = (prior.mean - worst) / (best - worst)
        spread = prior.variance / (best - worst) ** 2
        strength = max(share * (1 - share) / spread - 1, _LEAST_STRENGTH)
        right = num * (means - worst) / (best - worst)
        alpha, beta = strength * share + right, strength * (1 - share) + num - right
        return draws.beta(alpha, beta, size=size)
    noise = ((num - 1) * num * noises + prior.pooled) / num**2  # as in `difference_in_errors`
    weight = prior.variance / (prior.variance + noise)
    centre = weight * means + (1 - weight) * prior.mean
    return draws.normal(centre, np.sqrt(weight * noise), size=size)


def pair_sums(responses: Responses, outcomes: Outcomes) -> dict[str, float]:
    """Count pairs of steps of one response whose true values clearly differ.

    `pairs_right` counts the pairs that the critic puts in the same order. Equal values count half.
    Pairs without the critic's values are not counted at all.
    """
    pairs = right = 0.0
    bound = NormalDist().inv_cdf(1 - _LEVEL / 2)
    for steps in responses:
        for earlier, later in combinations(steps, 2):
            if earlier.value is None or later.value is None:
                continue
            rise = difference_in_errors(earlier, later, outcomes)
            if abs(rise) < bound:
                continue
            value_rise = later.value - earlier.value
            pairs += 1
            right += 0.5 if value_rise == 0 else float((value_rise > 0) == (rise > 0))
    return {"pairs": pairs, "pairs_right": right}
