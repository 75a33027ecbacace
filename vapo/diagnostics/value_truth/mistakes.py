"""Which steps of a response lose value, by the truth and by the critic."""

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

_LEVEL = 0.05  # chance that a response without any fall is said to have one
_DRAWS = 200  # of the true values of a response, for the share that an exact critic finds
_LEAST_STRENGTH = 0.1  # of the prior, in returns, where the measured values are all at the ends

Responses = Sequence[Sequence[TruthPoint]]  # the steps of each response, in order


@dataclass(frozen=True)
class Found:
    """Of `num` mistakes the critic's value falls most at `found`."""

    found: int = 0
    num: int = 0

    def __str__(self) -> str:
        return f"{self.found} of {self.num}"


@dataclass(frozen=True)
class MistakesByMark:
    """First mistakes whose own check says so, those whose check says that the step is right, and
    those whose step has no check, as everywhere on a task without checks.

    A critic that has learned to read the checks finds the first without seeing any mistake: only
    the others show that it sees the step.
    """

    marked: Found = Found()
    unmarked: Found = Found()
    unchecked: Found = Found()

    def __str__(self) -> str:
        if self.marked.num + self.unmarked.num == 0:
            return "the task does not tell whether responses mark their mistakes themselves"
        unchecked = f", {self.unchecked} without a check" if self.unchecked.num else ""
        return f"{self.marked} that the response marks itself, {self.unmarked} unmarked{unchecked}"


def difference_in_errors(before: TruthPoint, after: TruthPoint, outcomes: Outcomes) -> float:
    """The true value's rise from one point to the other, in standard errors.

    Of returns with two outcomes one more of each is counted (Agresti and Caffo 2000), so that K
    equal ones have an error too; of others the mean variance of both points counts as one draw.
    """
    pooled = fmean([before.noise * len(before.returns), after.noise * len(after.returns)])
    means, squared_error = [], 0.0
    for point in (before, after):
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
    """The step that lost value: the index of the point before it; None where none clearly did.

    With n steps to look at, each is tested at a level of 0.05 / n, one-sided.
    """
    if len(steps) < 2:
        return None
    bound = NormalDist().inv_cdf(_LEVEL / (len(steps) - 1))
    for place, (before, after) in enumerate(pairwise(steps)):
        if difference_in_errors(before, after, outcomes) < bound:
            return place
    return None


def largest_fall(steps: Sequence[TruthPoint]) -> tuple[int, float] | None:
    """Where the critic's value falls most, and by how much; None where it never falls."""
    falls = [
        (before.value - after.value, -place)
        for place, (before, after) in enumerate(pairwise(steps))
        if before.value is not None and after.value is not None and before.value > after.value
    ]
    fall, place = max(falls, default=(0.0, 0))
    return (-place, fall) if falls else None


def mistakes_by_mark(prompts: Sequence[Responses], outcomes: Outcomes) -> MistakesByMark:
    """The counts over all responses with a clear fall of the truth."""
    found = {True: [0, 0], False: [0, 0], None: [0, 0]}  # in the order of the fields
    for steps in chain(*prompts):
        place, fall = first_clear_fall(steps, outcomes), largest_fall(steps)
        if place is not None:
            counts = found[steps[place + 1].is_marked]
            counts[0] += fall is not None and fall[0] == place
            counts[1] += 1
    return MistakesByMark(*(Found(*counts) for counts in found.values()))


def mistake_sums(
    prompts: Sequence[Responses], outcomes: Outcomes, *, seed: int = 0
) -> list[dict[str, float]]:
    """For each prompt: its responses with a clear fall, how many of them the critic finds, how
    many an exact one would, how many responses the critic names (the largest falls of all, as
    many as have one), how many rightly. Without values those of the critic are NaN."""
    falls = [[(first_clear_fall(s, outcomes), largest_fall(s)) for s in own] for own in prompts]
    num = sum(place is not None for own in falls for place, _ in own)
    sizes = sorted((fall[1] for own in falls for _, fall in own if fall is not None), reverse=True)
    least = sizes[min(num, len(sizes)) - 1] if num and sizes else math.inf
    points = [point for own in prompts for steps in own for point in steps]
    has_values, prior = any(p.value is not None for p in points), _prior(points) if num else None
    draws, found = np.random.default_rng(seed), []
    for own, of_own in zip(prompts, falls, strict=True):
        is_right = [fall is not None and fall[0] == place for place, fall in of_own]
        is_named = [fall is not None and fall[1] >= least for _, fall in of_own]
        by_exact = 0.0
        for steps, (place, _) in zip(own, of_own, strict=True):
            if place is not None and prior is not None:
                values = _drawn_values(steps, prior, outcomes, draws)
                drops = values[:, :-1] - values[:, 1:]
                by_exact += float((drops.argmax(axis=1) == place).mean())
        found.append(
            {
                "with_mistake": float(sum(place is not None for place, _ in of_own)),
                "found": float(sum(is_right)) if has_values else math.nan,
                "found_by_exact": by_exact,
                "named": float(sum(is_named)),
                "named_right": float(sum(map(min, is_right, is_named))),
            }
        )
    return found


class _Prior(NamedTuple):
    """Of the true values of all points, and the mean variance of the returns after one."""

    mean: float
    variance: float
    pooled: float


def _prior(points: Sequence[TruthPoint]) -> _Prior:
    """Mean and variance of the measured values, the noise taken out of the variance."""
    means, noises = np.array([(point.mean, point.noise) for point in points]).T.copy()
    variance = max(means.var() - noises.mean(), 1e-6 * means.var())
    pooled = np.mean([point.noise * len(point.returns) for point in points])
    return _Prior(means.mean(), variance, float(pooled))


def _drawn_values(
    steps: Sequence[TruthPoint], prior: _Prior, outcomes: Outcomes, draws: np.random.Generator
) -> Float[np.ndarray, "D S"]:
    """True values of a response's steps, drawn from what the K returns of each leave open.

    For two outcomes the posterior of a Beta prior, else of a normal one. Steps are drawn
    independently, so where falls of one response are equal in truth, the share in which the true
    values fall most at the first clear one is too low.
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
    kept = prior.variance / (prior.variance + noise)
    centre = kept * means + (1 - kept) * prior.mean
    return draws.normal(centre, np.sqrt(kept * noise), size=size)


def pair_sums(responses: Responses, outcomes: Outcomes) -> dict[str, float]:
    """Pairs of steps of one response whose true values clearly differ, and how many of them the
    critic puts in this order; an equal value is half a one."""
    pairs = right = 0.0
    bound = NormalDist().inv_cdf(1 - _LEVEL / 2)
    for steps in responses:
        for before, after in combinations(steps, 2):
            if before.value is None or after.value is None:
                continue
            rise = difference_in_errors(before, after, outcomes)
            if abs(rise) < bound:
                continue
            own = after.value - before.value
            pairs += 1
            right += 0.5 if own == 0 else float((own > 0) == (rise > 0))
    return {"pairs": pairs, "pairs_right": right}
