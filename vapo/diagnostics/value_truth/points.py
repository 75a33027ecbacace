"""Measured states beside the critic's values, and the intervals of what they are worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from scipy.stats import binomtest
from scipy.stats import t as students_t

from vapo.rollouts.continuations import MeasuredState

Outcomes = tuple[float, float] | None  # the two returns that there are, where there are two


@dataclass(frozen=True)
class TruthPoint(MeasuredState):
    """A measured state of a response, beside what the critic says of it.

    `length` is the response's tokens. `value` is the critic's V(s) there, None without a critic;
    `baseline` the mean return of the other responses to the prompt, None without others.
    `is_of_steps`: the response was continued from every one of its steps, and this is one; else it
    is a prefix of its own, drawn to cover the positions. `is_marked`: the response's own check
    calls the step that ends here wrong; None: no check ends here.
    """

    prompt_id: str
    length: int
    value: float | None = None
    baseline: float | None = None
    is_of_steps: bool = True
    is_marked: bool | None = None

    @property
    def position(self) -> float:
        """The share of the response that comes before."""
        return self.num_tokens / self.length


@lru_cache
def share_interval(part: int, whole: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; it has a width where all are alike, too."""
    low, high = binomtest(part, whole).proportion_ci(method="wilson")
    return float(low), float(high)


def true_value_interval(
    state: MeasuredState, outcomes: Outcomes, *, spread: float
) -> tuple[float, float]:
    """The 95 % interval of the value of which the state's K returns are draws.

    Where a return is one of two `outcomes` it is Wilson's for a share, which covers for few draws
    too. Else Student's, of a variance to which `spread`, the mean variance of the returns after
    one state, counts as one more draw: K equal returns do not make a value certain.

    Source: Wilson 1927; Brown, Cai and DasGupta 2001.
    """
    num, mean = len(state.returns), state.mean
    if outcomes is not None:
        worst, best = outcomes
        low, high = share_interval(round(num * (mean - worst) / (best - worst)), num)
        return worst + low * (best - worst), worst + high * (best - worst)
    half = float(students_t.ppf(0.975, num)) * math.sqrt((state.squares + spread) / num / num)
    return mean - half, mean + half
