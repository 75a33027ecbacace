"""A prefix whose value was measured: its continuations' returns beside the critic's value."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from scipy.stats import binomtest
from scipy.stats import t as students_t


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


@dataclass(frozen=True)
class TruthPoint:
    """The first `num_tokens` tokens of a response, and what continuations from them earned.

    `row` is the response's in its batch, `length` its tokens. `value` is the critic's V(s) there,
    None without a critic; `baseline` the mean return of the other responses to the prompt, None
    without others. `is_of_steps`: the response was continued from every one of its steps, and
    this is one; else it is a prefix of its own, drawn to cover the positions. `is_marked`: the
    response's own check calls the step that ends here wrong; None: no check ends here. Points
    with equal prompts and tokens share their continuations.
    """

    prompt_id: str
    row: int
    num_tokens: int
    length: int
    returns: tuple[float, ...]
    value: float | None = None
    baseline: float | None = None
    is_of_steps: bool = True
    is_marked: bool | None = None

    @cached_property
    def mean(self) -> float:
        return statistics.fmean(self.returns)

    @cached_property
    def noise(self) -> float:
        """The variance of `mean` around the true value; needs K >= 2."""
        return noise_of_mean(self.returns)

    @property
    def position(self) -> float:
        """The share of the response that comes before."""
        return self.num_tokens / self.length


def noise_of_mean(returns: Sequence[float]) -> float:
    """The variance of the mean of K returns around the true value, estimated without bias.

    Needs K >= 2.
    """
    num, mean = len(returns), statistics.fmean(returns)
    return sum((x - mean) ** 2 for x in returns) / (num - 1) / num


def share_interval(part: int, whole: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; it has a width where all are alike, too."""
    low, high = binomtest(part, whole).proportion_ci(method="wilson")
    return float(low), float(high)


def true_value_interval(
    returns: Sequence[float], outcomes: tuple[float, float] | None, *, spread: float
) -> tuple[float, float]:
    """The 95 % interval of the mean of which K returns are draws.

    Where a return is one of two `outcomes` it is Wilson's for a share, which covers for few draws
    too. Else Student's, of a variance to which `spread`, the mean variance of the returns after
    one prefix, counts as one more draw: K equal returns do not make a value certain.

    Source: Wilson 1927; Brown, Cai and DasGupta 2001.
    """
    num, mean = len(returns), statistics.fmean(returns)
    if outcomes is not None:
        worst, best = outcomes
        low, high = share_interval(round(num * (mean - worst) / (best - worst)), num)
        return worst + low * (best - worst), worst + high * (best - worst)
    squares = sum((x - mean) ** 2 for x in returns)
    half = float(students_t.ppf(0.975, num)) * math.sqrt((squares + spread) / num / num)
    return mean - half, mean + half
