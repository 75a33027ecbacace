"""Estimates with intervals, and the bootstrap that makes them.

It imports no torch, so that `vapo inspect` reads files without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
