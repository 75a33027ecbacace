"""A mean over seeds, its interval, and the difference of two rows; scores are in per cent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev, variance
from typing import Any, Literal

import numpy as np
from scipy.stats import permutation_test

from vapo.sweep.report.crossed import PromptMeans, crossed, half_width, paired, quantile

ROUNDING = 1e-9  # per cent: what float arithmetic may leave of a difference of 0
COLLAPSE_SPREAD = 10.0  # points of standard deviation over seeds; of one kind they have 2 to 6
_MIN_PROMPTS = 4  # fewer are too few to estimate the spread between prompts
Over = Literal["", "seeds", "prompts", "seeds and prompts"]
"""What an interval takes as drawn at random: all else it holds as it was."""


@dataclass(frozen=True)
class MeanOfSeeds:
    """A mean; `interval` None where one run, or none that can be paired, gives no spread.

    Where seeds collapse it is None too: `seeds` has each one's number then, and a difference the
    `p` of a permutation test. With one seed in five collapsed, t-intervals of five cover the mean
    in 67 % of the cases, not in 95.
    """

    mean: float
    interval: tuple[float, float] | None = None
    seeds: tuple[float, ...] = ()
    p: float | None = None
    over: Over = ""

    @property
    def is_clear(self) -> bool | None:
        """Whether the interval leaves zero out, by more than what float arithmetic may add; of
        seeds that collapse, whether p is below 5 %. None where nothing is known of how training
        runs spread."""
        if self.p is not None:
            return self.p < 0.05
        if self.interval is None or self.over == "prompts":
            return None
        return self.interval[0] > ROUNDING or self.interval[1] < -ROUNDING


def estimate(values: Sequence[float], prompts: Sequence[PromptMeans] = ()) -> MeanOfSeeds:
    """Mean +- t(0.975, n - 1) s / sqrt(n), or each seed where some collapse.

    With what each seed made of the `prompts`, shares that all seeds have of the same ones, the
    interval is over seeds and prompts together. A single seed has one over its prompts alone.
    """
    mean = fmean(values)
    if len(values) < 2:
        return of_one_seed(mean, prompts[0]) if prompts else MeanOfSeeds(mean)
    if stdev(values) > COLLAPSE_SPREAD:
        return MeanOfSeeds(mean, seeds=tuple(values))
    if (scores := crossed(prompts)) is not None:
        half = 100 * half_width(scores)
        return MeanOfSeeds(mean, (mean - half, mean + half), over="seeds and prompts")
    half = quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return MeanOfSeeds(mean, (mean - half, mean + half), over="seeds")


def of_one_seed(mean: float, prompts: PromptMeans) -> MeanOfSeeds:
    """One run's mean, with Student's interval over its prompts where these are four or more."""
    if len(prompts) < _MIN_PROMPTS:
        return MeanOfSeeds(mean)
    error = 100 * stdev(prompts.values()) / math.sqrt(len(prompts))
    half = quantile(len(prompts) - 1) * error
    return MeanOfSeeds(mean, (mean - half, mean + half), over="prompts")


def compare(
    scores: Mapping[int, float],
    full: Mapping[int, float],
    prompts: tuple[Mapping[int, PromptMeans], Mapping[int, PromptMeans]] = ({}, {}),
) -> tuple[MeanOfSeeds, str]:
    """Row minus full system: paired where the seeds are common, else Welch's interval.

    Seeds fix prompts, evaluation and value pretraining, so pairing takes their part of the
    spread out. Where seeds collapse the p value is of a permutation test: the signs of paired
    differences, or the rows of unpaired runs, are as likely as any other if the rows are alike.
    With `prompts`, of both rows by seed, pairs are of a seed and a prompt.
    """
    common = sorted(scores.keys() & full.keys())
    if len(common) >= 2 or (common and min(len(scores), len(full)) < 2):
        differences = [scores[seed] - full[seed] for seed in common]
        mine, theirs = ([one.get(seed, {}) for seed in common] for one in prompts)
        found = estimate(differences, paired(mine, theirs))
        if found.seeds:
            found = replace(found, p=_permutation_p([differences], "samples"))
        return found, "paired"
    both = [list(values.values()) for values in (scores, full)]
    mean = fmean(both[0]) - fmean(both[1])
    if min(map(len, both)) < 2:
        return MeanOfSeeds(mean), "unpaired"
    if max(map(stdev, both)) > COLLAPSE_SPREAD:
        return MeanOfSeeds(mean, p=_permutation_p(both, "independent")), "unpaired"
    parts = [variance(values) / len(values) for values in both]
    if sum(parts) == 0:
        return MeanOfSeeds(mean, (mean, mean), over="seeds"), "unpaired"
    degrees = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, both, strict=True)
    )
    half = quantile(degrees) * math.sqrt(sum(parts))
    return MeanOfSeeds(mean, (mean - half, mean + half), over="seeds"), "unpaired"


def _permutation_p(samples: Sequence[Sequence[float]], kind: str) -> float:
    def difference(*samples: np.ndarray, axis: int) -> Any:
        means = [np.mean(values, axis=axis) for values in samples]
        return means[0] - sum(means[1:])

    found = permutation_test(
        samples, difference, permutation_type=kind, vectorized=True, rng=np.random.default_rng(0)
    )
    return float(found.pvalue)
