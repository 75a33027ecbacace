"""Compute means over seeds with their intervals, and differences of rows. Scores are in per
cent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev, variance
from typing import Any, Literal

import numpy as np
from scipy.stats import permutation_test

from vapo.intervals import (
    MIN_PROMPTS,
    crossed_half_width,
    interval_text,
    t_half_width,
    t_quantile,
)

ROUNDING = 1e-9  # per cent: float arithmetic may turn a difference of 0 into this
COLLAPSE_SPREAD = 10.0  # points of standard deviation; without a collapse it is 2 to 6
PromptMeans = Mapping[str, float]
"""A prompt's digest -> the share of correct responses to it."""
Over = Literal["", "seeds", "prompts", "seeds and prompts"]
"""What an interval takes as drawn at random. It takes everything else as fixed."""


@dataclass(frozen=True)
class MeanOfSeeds:
    """A mean over seeds, or a difference of two such means, with its 95 % interval.

    If some seeds collapse, there is no interval: with one seed in five collapsed, t-intervals of
    five seeds cover the mean in 67 % of the cases, not in 95 %.

    Attributes:
        interval: None with one run, if runs cannot be paired, or if some seeds collapse.
        seeds: each seed's number if some seeds collapse; else empty.
        p: of a difference whose seeds collapse, the p-value of a permutation test; else None.
        over: what the interval takes as drawn at random; "" without an interval.
    """

    mean: float
    interval: tuple[float, float] | None = None
    seeds: tuple[float, ...] = ()
    p: float | None = None
    over: Over = ""

    @property
    def is_clear(self) -> bool | None:
        """Whether the mean differs from 0 clearly: its interval excludes 0, or `p` is below 5 %.

        None if it is unknown how much training runs differ.
        """
        if self.p is not None:
            return self.p < 0.05
        if self.interval is None or self.over == "prompts":
            return None
        return self.interval[0] > ROUNDING or self.interval[1] < -ROUNDING

    def text(self, sign: str = "") -> str:
        """Return the mean to one digit, with its interval if there is one.

        Args:
            sign: "+" shows the sign of positive numbers, too, as for a difference.
        """
        spec = f"{sign}.1f"
        if self.interval is None:
            return format(self.mean, spec)
        return interval_text(self.mean, self.interval, spec)


def estimate(values: Sequence[float], prompts: Sequence[PromptMeans] = ()) -> MeanOfSeeds:
    """Return the mean of the seeds' values, with the best interval that the data allow.

    With scores of single prompts, equal for all seeds, it is an interval over seeds and prompts.
    Without them it is +- t(0.975, n - 1) s / sqrt(n) over seeds. A single seed has an interval over
    its prompts alone. If some seeds collapse, the result has each seed's number instead.

    Args:
        prompts: for each seed, the share of correct responses to each prompt.
    """
    mean = fmean(values)
    if len(values) < 2:
        return estimate_one_seed(mean, prompts[0]) if prompts else MeanOfSeeds(mean)
    if stdev(values) > COLLAPSE_SPREAD:
        return MeanOfSeeds(mean, seeds=tuple(values))
    if (scores := score_table(prompts)) is not None:
        half = 100 * crossed_half_width(scores)
        return MeanOfSeeds(mean, (mean - half, mean + half), over="seeds and prompts")
    return estimate_over_seeds(values)


def estimate_over_seeds(values: Sequence[float]) -> MeanOfSeeds:
    """Return the mean of two seeds or more, with Student's interval over them."""
    mean, half = fmean(values), t_half_width(values)
    return MeanOfSeeds(mean, (mean - half, mean + half), over="seeds")


def estimate_one_seed(mean: float, prompts: PromptMeans) -> MeanOfSeeds:
    """Return one run's mean, with Student's interval over its prompts if there are four or more."""
    if len(prompts) < MIN_PROMPTS:
        return MeanOfSeeds(mean)
    half = 100 * t_half_width([*prompts.values()])
    return MeanOfSeeds(mean, (mean - half, mean + half), over="prompts")


def score_table(seeds: Sequence[PromptMeans]) -> np.ndarray | None:
    """Return the shares of correct responses as a table [seeds, prompts].

    The result is None if the table has no interval: with fewer than two seeds or two prompts, or if
    the seeds were scored on different prompts.
    """
    if (
        len(seeds) < 2
        or len(seeds[0]) < 2
        or any(means.keys() != seeds[0].keys() for means in seeds)
    ):
        return None
    return np.array([[means[prompt] for prompt in seeds[0]] for means in seeds])


def paired_differences(
    rows: Sequence[PromptMeans], other_rows: Sequence[PromptMeans]
) -> list[dict[str, float]]:
    """Return for each seed prompt -> the difference of two rows' shares of correct responses.

    The mapping is empty for a seed whose two runs were scored on different prompts.

    Args:
        rows, other_rows: for each seed, the shares of one row and of the other row.
    """
    both = zip(rows, other_rows, strict=True)
    return [
        {p: means[p] - other_means[p] for p in means} if means.keys() == other_means.keys() else {}
        for means, other_means in both
    ]


def compare(
    scores: Mapping[int, float],
    full: Mapping[int, float],
    prompts: tuple[Mapping[int, PromptMeans], Mapping[int, PromptMeans]] = ({}, {}),
) -> tuple[MeanOfSeeds, str]:
    """Return a row's difference to the full system, and whether it is "paired" or "unpaired".

    With common seeds the runs are paired, otherwise the interval is Welch's. A seed fixes prompts,
    evaluation and value pretraining, so pairing removes their part of the spread. If seeds
    collapse, the result has a p-value of a permutation test, which flips the signs of paired
    differences or permutes the rows of unpaired runs.

    Args:
        scores, full: seed -> score, of the row and of the full system.
        prompts: seed -> shares of correct responses, of the row and of the full system. With them,
            each pair is a seed and a prompt.
    """
    common = sorted(scores.keys() & full.keys())
    if len(common) >= 2 or (common and min(len(scores), len(full)) < 2):
        differences = [scores[seed] - full[seed] for seed in common]
        means, full_means = (
            [row_prompts.get(seed, {}) for seed in common] for row_prompts in prompts
        )
        result = estimate(differences, paired_differences(means, full_means))
        if result.seeds:
            result = replace(result, p=_permutation_p([differences], "samples"))
        return result, "paired"
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
    half = t_quantile(degrees) * math.sqrt(sum(parts))
    return MeanOfSeeds(mean, (mean - half, mean + half), over="seeds"), "unpaired"


def _permutation_p(samples: Sequence[Sequence[float]], kind: str) -> float:
    def difference(*samples: np.ndarray, axis: int) -> Any:
        means = [np.mean(values, axis=axis) for values in samples]
        return means[0] - sum(means[1:])

    result = permutation_test(
        samples, difference, permutation_type=kind, vectorized=True, rng=np.random.default_rng(0)
    )
    return float(result.pvalue)
