"""The numbers by which tokens can be coloured, and the ends of their colour scales."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

_QUANTILE = 0.98  # a few extreme tokens must not leave the others without colour


class Measure(NamedTuple):
    """A kind of number that each token has, and its colour scale on the page.

    Attributes:
        name: the name of the column with the numbers.
        low_means, high_means: the labels at the ends of the scale.
        doc: the explanation on the page.
        strong: the end of a sequential scale that stands out.
        last_token_counts: whether the last tokens of responses count for the ends of the scale.
    """

    name: str
    label: str
    scale: Literal["sequential", "diverging"]
    low_means: str
    high_means: str
    doc: str
    strong: Literal["high", "low"] = "high"
    last_token_counts: bool = True


MEASURES = (
    Measure(
        "value",
        "value",
        "sequential",
        "expects a low reward",
        "expects a high reward",
        "V(s_t): what the critic expected before the token was sampled, in units of the reward",
    ),
    Measure(
        "trusted_value",
        "trusted value",
        "sequential",
        "expects a low reward",
        "expects a high reward",
        "what the advantages are against with algorithm.baseline.kind trusted: the critic's value "
        "mixed with the mean reward of the prompt's other responses, as far as it was right before",
    ),
    Measure(
        "value_error",
        "value error",
        "diverging",
        "too pessimistic",
        "too optimistic",
        "V(s_t) - return: above 0 the critic was too optimistic, below 0 too pessimistic, beside "
        "what this one response earned",
    ),
    Measure(
        "truth_error",
        "value error against the truth",
        "diverging",
        "too pessimistic",
        "too optimistic",
        "V(s_t) - the true value, the mean of what continuations from the last measured prefix at "
        "or before the token earned; a token in grey, without colour, has no measured prefix",
    ),
    Measure(
        "advantage",
        "advantage",
        "diverging",
        "made less likely",
        "made more likely",
        "as the loss uses it: above 0 the token is made more likely, below 0 less",
    ),
    Measure(
        "td_error",
        "TD error",
        "diverging",
        "the critic's hope fell",
        "the critic's hope rose",
        "r_t + gamma V(s_t+1) - V(s_t): how far the token changed the critic's prediction; "
        "at the last token, which the scale leaves out, the surprise of the reward",
        last_token_counts=False,
    ),
    Measure(
        "logprob",
        "log-prob",
        "sequential",
        "an unlikely token",
        "a likely token",
        "log pi_old of the token, by the trainer, before any update on it, in nats",
        strong="low",
    ),
    Measure(
        "rollout_logprob",
        "engine log-prob",
        "sequential",
        "an unlikely token",
        "a likely token",
        "log-prob of the token in the engine that sampled it, in nats",
        strong="low",
    ),
    Measure(
        "entropy",
        "entropy",
        "sequential",
        "one token was sure",
        "many were possible",
        "of pi_old where the token was sampled, in nats: how open the choice was",
    ),
    Measure(
        "engine_gap",
        "engine gap",
        "diverging",
        "likelier in the engine",
        "likelier in the trainer",
        "log pi_old by the trainer - log-prob in the engine, in nats: rounding, and with "
        "overlapped rollouts one update; not the ratio of the update to come, which is 1 here",
    ),
)


def domain(measure: Measure, numbers: ArrayLike) -> tuple[float, float]:
    """Return the lowest and the highest number of the colour scale for these numbers.

    Numbers that are not finite do not count. Diverging scales are symmetric around 0.
    """
    finite = np.asarray(numbers, dtype=float)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return (-1.0, 1.0) if measure.scale == "diverging" else (0.0, 1.0)
    if measure.scale == "diverging":
        end = _quantile(np.abs(finite), _QUANTILE)
        return -end, end
    return _quantile(finite, 1 - _QUANTILE), _quantile(finite, _QUANTILE)


def _quantile(numbers: np.ndarray, share: float) -> float:
    """Return the number nearest to a quantile, without interpolation.

    Args:
        share: the quantile, from 0 to 1.
    """
    ordered = np.sort(numbers)
    return float(ordered[round(share * (len(ordered) - 1))])
