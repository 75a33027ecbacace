"""Estimates with intervals, and the bootstrap that makes them. Imports no torch, so that a file is
inspected without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

MIN_PROMPTS = 4  # fewer say nothing of the spread between prompts
_MOST_WITHOUT = 0.025  # of the resamples; the rest would be those in which the truth moves most

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
        """Whether the interval has limits: with few prompts, or a truth that does not move beyond
        the noise, it has none."""
        return math.isfinite(self.low) and math.isfinite(self.high)


UNKNOWN = Figure(math.nan, math.nan, math.nan)


class Bootstrap:
    """Makes figures of sums over prompts, which are drawn anew `num_resamples` times.

    Args:
        table: each sum, an array of one number a prompt.
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
        self.resampled: Sums = table  # of no prompt nothing can be drawn
        if num_prompts:
            draw, shares = np.random.default_rng(seed), np.full(num_prompts, 1 / num_prompts)
            counts = draw.multinomial(num_prompts, shares, size=num_resamples)
            self.resampled = {name: counts @ values for name, values in table.items()}

    def figure(self, function: Callable[[Sums], Any]) -> Figure:
        """A function of the sums, with its interval."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value, many = float(function(self.totals)), function(self.resampled)
        if not math.isfinite(value):
            return UNKNOWN
        if not self.is_bounded or np.isnan(many).mean() > _MOST_WITHOUT:
            return Figure(value, -math.inf, math.inf)
        return Figure(value, *np.nanquantile(many, [0.025, 0.975]).tolist())
