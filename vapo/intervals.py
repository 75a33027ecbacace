"""Estimates and their 95 % intervals: Student's t, Wilson's, crossed ones and the bootstrap's.

It imports no torch, so that `vapo inspect` and `vapo report` read files without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import stdev
from typing import Any, NamedTuple

import numpy as np

MIN_PROMPTS = 4  # with fewer, the spread between prompts cannot be estimated
SHIFTED_ABOVE = 0.2  # a critic's mean error / the standard deviation of truth or returns
# the largest share of resamples without a figure: the truth moves too little in them, so an
# interval of the other ones would be biased
_MAX_UNKNOWN_SHARE = 0.025

Sums = Mapping[str, Any]  # name -> a number, or an array of one for each resample


class Figure(NamedTuple):
    """An estimate with its 95 % interval; NaN where it cannot be estimated."""

    value: float
    low: float
    high: float

    @property
    def is_unknown(self) -> bool:
        return math.isnan(self.value)

    @property
    def is_bounded(self) -> bool:
        """Whether the interval has limits.

        It has none with few prompts, or where the truth does not move beyond the noise.
        """
        return math.isfinite(self.low) and math.isfinite(self.high)


UNKNOWN = Figure(math.nan, math.nan, math.nan)


def quote(figure: Figure) -> str:
    """Return a figure with its interval as text.

    >>> quote(Figure(0.123, 0.1, 0.2)), quote(Figure(-4.5, -5, -4))
    ('0.12 [0.10, 0.20]', '-4.50 [-5.00, -4.00]')
    """
    if figure.is_unknown:
        return "unknown"
    if not figure.is_bounded:
        return f"{decimals(figure.value)} (too few prompts for an interval)"
    return f"{decimals(figure.value)} [{decimals(figure.low)}, {decimals(figure.high)}]"


def decimals(x: float) -> str:
    """Return a number as rounded text: to two digits after the point, or fewer if it is large.

    Small numbers have one significant digit, so that they do not look like 0.

    >>> decimals(0.125), decimals(-0.001), decimals(-0.0), decimals(1234.5), decimals(12.34)
    ('0.12', '-0.001', '0.00', '1234', '12.3')
    """
    size = abs(x)
    if size < 1e-6:
        return "0.00"  # which may be a zero with a sign
    return f"{x:.1g}" if size < 0.01 else f"{x:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def interval_text(mean: float, limits: tuple[float, float], spec: str = ".1f") -> str:
    """Return a mean with its interval as text, each number in the same format.

    >>> interval_text(2.04, (-1.5, 5.58), "+.1f")
    '+2.0 [-1.5, +5.6]'
    """
    return f"{mean:{spec}} [{limits[0]:{spec}}, {limits[1]:{spec}}]"


@lru_cache(maxsize=256)
def t_quantile(degrees: float, probability: float = 0.975) -> float:
    """Return a quantile of Student's t distribution with these degrees of freedom."""
    from scipy.special import stdtrit  # `vapo inspect` answers before it needs an interval

    return float(stdtrit(degrees, probability))


def t_half_width(values: Sequence[float]) -> float:
    """Return half the width of Student's interval of a mean: t(0.975, n - 1) s / sqrt(n)."""
    return t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def t_interval(mean: float, standard_error: float, num: int) -> tuple[float, float]:
    """Return the 95 % interval of a mean over `num` prompts, by Student's t.

    For fewer than 4 prompts it is (-inf, inf).
    """
    if num < MIN_PROMPTS:
        return -math.inf, math.inf
    half_width = t_quantile(num - 1) * standard_error
    return mean - half_width, mean + half_width


def cut_t_intervals(
    means: Iterable[float],
    standard_errors: Iterable[float],
    nums: Iterable[int],
    *,
    lowest: float,
    highest: float,
) -> list[list[float | None]]:
    """Return the low limits and the high limits of several means by `t_interval`.

    They are cut to the lowest and highest possible mean, because Student's t does not respect
    these. None if an interval has no limit.
    """
    intervals = map(t_interval, means, standard_errors, nums)
    return [
        [None if math.isinf(x) else min(max(x, lowest), highest) for x in limits]
        for limits in zip(*intervals, strict=True)
    ]


@lru_cache
def share_interval(part: int, whole: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share. It has a width even if all outcomes are alike."""
    from scipy.stats import binomtest  # loads for seconds

    low, high = binomtest(part, whole).proportion_ci(method="wilson")
    return float(low), float(high)


def crossed_half_width(scores: np.ndarray) -> float:
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
    squares = [t_quantile(number - 1) ** 2 * part for part, number in parts]
    return math.sqrt(sum(squares) / scores.size)


class Bootstrap:
    """Makes figures from sums over prompts, and their intervals from resampled prompts.

    Args:
        table: name of a sum -> an array with a number for each prompt.
        num_resamples: how resampled times `num_prompts` prompts are drawn with replacement.
    """

    def __init__(
        self,
        table: Mapping[str, Any],
        num_prompts: int,
        seed: int | np.random.Generator,
        num_resamples: int,
    ) -> None:
        self.is_bounded = num_prompts >= MIN_PROMPTS
        self.totals = {name: values.sum() for name, values in table.items()}
        self.resampled: Sums = table  # without prompts nothing can be drawn
        if num_prompts:
            draw, shares = np.random.default_rng(seed), np.full(num_prompts, 1 / num_prompts)
            counts = draw.multinomial(num_prompts, shares, size=num_resamples)
            self.resampled = {name: counts @ values for name, values in table.items()}

    def figure(self, function: Callable[[Sums], Any]) -> Figure:
        """Compute a function of the sums, with its interval."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value, resampled = float(function(self.totals)), function(self.resampled)
        if not math.isfinite(value):
            return UNKNOWN
        if not self.is_bounded or np.isnan(resampled).mean() > _MAX_UNKNOWN_SHARE:
            return Figure(value, -math.inf, math.inf)
        return Figure(value, *np.nanquantile(resampled, [0.025, 0.975]).tolist())
