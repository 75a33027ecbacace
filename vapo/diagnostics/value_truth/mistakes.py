"""Which steps of a response lose value, by the truth and by the critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import NormalDist, fmean

from vapo.diagnostics.value_truth.points import TruthPoint

_LEVEL = 0.05  # chance that a response without any fall is said to have one

Outcomes = tuple[float, float] | None
Responses = Sequence[Sequence[TruthPoint]]  # the steps of each response, in order


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


def mistake_sums(prompts: Sequence[Responses], outcomes: Outcomes) -> list[dict[str, float]]:
    """For each prompt: its responses with a clear fall, how many of them the critic finds, how
    many responses it names (the largest falls of all, as many as have one), how many rightly."""
    first = [[first_clear_fall(steps, outcomes) for steps in own] for own in prompts]
    largest = [[largest_fall(steps) for steps in own] for own in prompts]
    num = sum(place is not None for own in first for place in own)
    sizes = sorted((fall[1] for own in largest for fall in own if fall is not None), reverse=True)
    least = sizes[min(num, len(sizes)) - 1] if num and sizes else math.inf
    found = []
    for places, falls in zip(first, largest, strict=True):
        is_right = [
            fall is not None and place is not None and fall[0] == place
            for place, fall in zip(places, falls, strict=True)
        ]
        is_named = [fall is not None and fall[1] >= least for fall in falls]
        found.append(
            {
                "with_mistake": float(sum(place is not None for place in places)),
                "found": float(sum(is_right)),
                "named": float(sum(is_named)),
                "named_right": float(sum(map(min, is_right, is_named))),
            }
        )
    return found


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
