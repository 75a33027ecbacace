"""Intervals over seeds and prompts together, for seeds that were scored on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from scipy.stats import t as students_t

PromptMeans = Mapping[str, float]
"""The share of correct responses to each prompt, by the prompt's digest."""


def score_table(seeds: Sequence[PromptMeans]) -> np.ndarray | None:
    """Return the scores as a table with a row for each seed and a column for each prompt. [S, P]

    Returns None where the table has no interval: with fewer than two seeds or two prompts, or
    where the seeds were scored on different prompts.
    """
    if (
        len(seeds) < 2
        or len(seeds[0]) < 2
        or any(means.keys() != seeds[0].keys() for means in seeds)
    ):
        return None
    return np.array([[means[prompt] for prompt in seeds[0]] for means in seeds])


def half_width(scores: np.ndarray) -> float:
    """Return half the width of the 95 % interval of the mean of a table of seeds and prompts.

    Both seeds and prompts count as drawn at random.

    With S seeds, P prompts and the mean squares of the two-way table without replication,
        MS_S  = P sum_s (mean_s - mean)^2 / (S - 1)
        MS_P  = S sum_p (mean_p - mean)^2 / (P - 1)
        MS_SP = sum_sp (score_sp - mean_s - mean_p + mean)^2 / ((S - 1) (P - 1)),
        h^2   = t_{S-1}^2 MS_S / (S P) + t_{P-1}^2 max(0, MS_P - MS_SP) / (S P)
    The first term is the interval over seeds alone, which holds for these very prompts. The second
    is that of the prompts' part of the variance of the mean, sigma_P^2 / P, since
    E[MS_P - MS_SP] = S sigma_P^2. So no interval is narrower than over seeds alone.

    Sources: the mean squares of Cornfield and Tukey 1956 (crossed random effects); independent
    parts' squared half-widths are added as in Howe 1974 (JASA 69, 789).
    """
    num_seeds, num_prompts = scores.shape
    by_seed = scores.mean(axis=1, keepdims=True)
    by_prompt = scores.mean(axis=0, keepdims=True)
    rest = scores - by_seed - by_prompt + scores.mean()
    ms_seeds = num_prompts * by_seed.var(ddof=1)
    ms_prompts = num_seeds * by_prompt.var(ddof=1)
    ms_rest = (rest**2).sum() / ((num_seeds - 1) * (num_prompts - 1))
    parts = (ms_seeds, num_seeds), (max(0.0, ms_prompts - ms_rest), num_prompts)
    squares = [quantile(number - 1) ** 2 * part for part, number in parts]
    return math.sqrt(sum(squares) / scores.size)


@lru_cache(maxsize=256)
def quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution with these degrees of freedom."""
    return float(students_t.ppf(0.975, degrees))


def paired_differences(
    rows: Sequence[PromptMeans], other_rows: Sequence[PromptMeans]
) -> list[dict[str, float]]:
    """Return the differences of two rows on the same seeds, prompt by prompt.

    A seed whose two runs were scored on different prompts has an empty mapping.
    """
    both = zip(rows, other_rows, strict=True)
    return [
        {p: means[p] - other_means[p] for p in means} if means.keys() == other_means.keys() else {}
        for means, other_means in both
    ]
