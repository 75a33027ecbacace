"""Measured states with the critic's values, and intervals of their true values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vapo.intervals import share_interval, t_quantile
from vapo.rollouts.continuations import MeasuredState

Outcomes = tuple[float, float] | None  # the two possible returns; None if there are others


@dataclass(frozen=True)
class TruthPoint(MeasuredState):
    """A measured state of a response: the returns of continuations from it, and the critic's value.

    Attributes:
        prompt_id: a label of the prompt.
        length: the number of the response's tokens.
        value: the critic's V(s); None without a critic.
        baseline: the mean return of the prompt's other responses; None without others.
        is_of_steps: True if the response was continued from every step and this is one of them;
            False for a single prefix, drawn to cover the positions.
        is_marked: whether the response itself calls the step that ends here wrong; None if it does
            not judge the step.
    """

    prompt_id: str
    length: int
    value: float | None = None
    baseline: float | None = None
    is_of_steps: bool = True
    is_marked: bool | None = None

    @property
    def position(self) -> float:
        """The state's position: the share of the response's tokens that come before it."""
        return self.num_tokens / self.length


def true_value_interval(
    state: MeasuredState, outcomes: Outcomes, *, spread: float
) -> tuple[float, float]:
    """Return the 95 % interval of a state's true value, the mean of which its K returns are draws.

    With two outcomes it is Wilson's interval of a share, which holds for few draws too. Otherwise
    it is Student's interval.

    Source: Wilson 1927; Brown, Cai and DasGupta 2001.

    Args:
        outcomes: the two possible returns; None if there are others.
        spread: the mean variance of the returns from a state. It counts as one more draw in
            Student's interval, because K equal returns do not make a value certain.
    """
    num, mean = len(state.returns), state.mean
    if outcomes is not None:
        worst, best = outcomes
        low, high = share_interval(round(num * (mean - worst) / (best - worst)), num)
        return worst + low * (best - worst), worst + high * (best - worst)
    half = t_quantile(num) * math.sqrt((state.squares + spread) / num / num)
    return mean - half, mean + half
