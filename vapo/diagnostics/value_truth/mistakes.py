"""Which steps of a response lose value, by the truth and by the critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, pairwise
from statistics import NormalDist, fmean

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
    means, variances = [], []
    pooled = fmean([before.noise * len(before.returns), after.noise * len(after.returns)])
    for point in (before, after):
        num, mean = len(point.returns), point.mean
        if outcomes is not None:
            num, mean = num + 2, (num * mean + sum(outcomes)) / (num + 2)
            variance = (mean - outcomes[0]) * (outcomes[1] - mean)
        else:
            variance = ((num - 1) * point.noise * num + pooled) / num
        means.append(mean)
        variances.append(variance / num)
    error = math.sqrt(sum(variances))
    rise = means[1] - means[0]
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
    values = [point.value for point in steps]
    falls = [
        (before - after, place)
        for place, (before, after) in enumerate(pairwise(values))
        if before is not None and after is not None and before > after
    ]
    if not falls:
        return None
    fall, place = max(falls, key=lambda pair: (pair[0], -pair[1]))
    return place, fall


def mistakes_by_mark(prompts: Sequence[Responses], outcomes: Outcomes) -> MistakesByMark:
    """The counts over all responses with a clear fall of the truth."""
    names = {True: "marked", False: "unmarked", None: "unchecked"}
    found = {field.name: [0, 0] for field in fields(MistakesByMark)}
    for steps in (steps for own in prompts for steps in own):
        place = first_clear_fall(steps, outcomes)
        if place is not None:
            fall = largest_fall(steps)
            counts = found[names[steps[place + 1].is_marked]]
            counts[0] += fall is not None and fall[0] == place
            counts[1] += 1
    return MistakesByMark(**{name: Found(*counts) for name, counts in found.items()})


def mistake_sums(
    prompts: Sequence[Responses], outcomes: Outcomes, *, seed: int = 0
) -> list[dict[str, float]]:
    """For each prompt: its responses with a clear fall, how many of them the critic finds, how
    many an exact one would, how many responses the critic names (the largest falls of all, as
    many as have one), how many rightly. Without values those of the critic are NaN."""
    first = [[first_clear_fall(steps, outcomes) for steps in own] for own in prompts]
    largest = [[largest_fall(steps) for steps in own] for own in prompts]
    num = sum(place is not None for own in first for place in own)
    sizes = sorted((fall[1] for own in largest for fall in own if fall is not None), reverse=True)
    least = sizes[min(num, len(sizes)) - 1] if num and sizes else math.inf
    has_values = any(p.value is not None for own in prompts for steps in own for p in steps)
    exact = _found_by_an_exact_critic(prompts, first, outcomes, seed=seed)
    found = []
    for places, falls, by_exact in zip(first, largest, exact, strict=True):
        is_right = [
            fall is not None and place is not None and fall[0] == place
            for place, fall in zip(places, falls, strict=True)
        ]
        is_named = [fall is not None and fall[1] >= least for fall in falls]
        found.append(
            {
                "with_mistake": float(sum(place is not None for place in places)),
                "found": float(sum(is_right)) if has_values else math.nan,
                "found_by_exact": by_exact,
                "named": float(sum(is_named)),
                "named_right": float(sum(map(min, is_right, is_named))),
            }
        )
    return found


def _found_by_an_exact_critic(
    prompts: Sequence[Responses],
    first: Sequence[Sequence[int | None]],
    outcomes: Outcomes,
    *,
    seed: int,
) -> list[float]:
    """For each prompt: in how many of its responses with a clear fall the true values fall most
    at the first clear one, as is to be expected from what was measured.

    The true value of a step is drawn from what its K returns leave open: for two outcomes the
    posterior of a Beta prior, else of a normal one; mean and variance of the prior are those of
    the measured values, the noise taken out of the variance. Steps are drawn independently, so
    where falls of one response are equal in truth the number is too low.
    """
    draw_values = _posterior([p for own in prompts for steps in own for p in steps], outcomes)
    draws = np.random.default_rng(seed)
    found = []
    for own, places in zip(prompts, first, strict=True):
        total = 0.0
        for steps, place in zip(own, places, strict=True):
            if place is not None:
                values = draw_values(steps, draws)
                falls = values[:, :-1] - values[:, 1:]
                total += float((falls.argmax(axis=1) == place).mean())
        found.append(total)
    return found


def _posterior(
    points: Sequence[TruthPoint], outcomes: Outcomes
) -> Callable[[Sequence[TruthPoint], np.random.Generator], Float[np.ndarray, "D S"]]:
    """What draws true values of a response's steps, given what was measured of all points."""
    means = np.array([point.mean for point in points])
    noises = np.array([point.noise for point in points])
    variance = max(means.var() - noises.mean(), 1e-6 * means.var()) if points else 0.0

    def of_two_outcomes(
        steps: Sequence[TruthPoint], draws: np.random.Generator
    ) -> Float[np.ndarray, "D S"]:
        assert outcomes is not None
        (worst, best), num = outcomes, np.array([len(point.returns) for point in steps])
        share = (means.mean() - worst) / (best - worst)
        spread = variance / (best - worst) ** 2
        strength = max(share * (1 - share) / spread - 1, _LEAST_STRENGTH)
        right = num * (np.array([point.mean for point in steps]) - worst) / (best - worst)
        alpha, beta = strength * share + right, strength * (1 - share) + num - right
        return draws.beta(alpha, beta, size=(_DRAWS, len(steps)))

    def of_other_returns(
        steps: Sequence[TruthPoint], draws: np.random.Generator
    ) -> Float[np.ndarray, "D S"]:
        num = np.array([len(point.returns) for point in steps])
        own = np.array([point.noise for point in steps])
        pooled = np.mean([point.noise * len(point.returns) for point in points])
        noise = ((num - 1) * num * own + pooled) / num**2  # as in `difference_in_errors`
        kept = variance / (variance + noise)
        centre = kept * np.array([p.mean for p in steps]) + (1 - kept) * means.mean()
        return draws.normal(centre, np.sqrt(kept * noise), size=(_DRAWS, len(steps)))

    return of_other_returns if outcomes is None else of_two_outcomes


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
