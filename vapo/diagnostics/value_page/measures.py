"""The numbers that tokens can be coloured by, and the ends of their colour scales."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

_QUANTILE = 0.98  # a few extreme tokens must not leave the others without colour


class Measure(NamedTuple):
    name: str
    label: str
    scale: Literal["sequential", "diverging"]
    doc: str
    strong: Literal["high", "low"] = "high"  # which end of a sequential scale stands out
    last_token_counts: bool = True  # for the scale's ends


MEASURES = (
    Measure(
        "value",
        "value",
        "sequential",
        "V(s_t): what the critic expected before the token was sampled, in units of the reward",
    ),
    Measure(
        "value_error",
        "value error",
        "diverging",
        "V(s_t) - return: above 0 the critic was too optimistic, below 0 too pessimistic",
    ),
    Measure(
        "advantage",
        "advantage",
        "diverging",
        "as the loss uses it: above 0 the token is made more likely, below 0 less",
    ),
    Measure(
        "td_error",
        "TD error",
        "diverging",
        "r_t + gamma V(s_t+1) - V(s_t): how far the token changed the critic's prediction; "
        "at the last token, which the scale leaves out, the surprise of the reward",
        last_token_counts=False,
    ),
    Measure(
        "logprob",
        "log-prob",
        "sequential",
        "log pi_old of the token, by the trainer, before any update on it, in nats",
        strong="low",
    ),
    Measure(
        "rollout_logprob",
        "engine log-prob",
        "sequential",
        "log-prob of the token in the engine that sampled it, in nats",
        strong="low",
    ),
    Measure(
        "entropy",
        "entropy",
        "sequential",
        "of pi_old where the token was sampled, in nats: how open the choice was",
    ),
    Measure(
        "engine_gap",
        "engine gap",
        "diverging",
        "log pi_old by the trainer - log-prob in the engine, in nats: rounding, and with "
        "overlapped rollouts one update; not the ratio of the update to come, which is 1 here",
    ),
)


def domain(measure: Measure, numbers: Tensor) -> tuple[float, float]:
    """The ends of the colour scale for all tokens; diverging scales are symmetric around 0."""
    numbers = numbers[numbers.isfinite()].double()
    if not len(numbers):
        return (-1.0, 1.0) if measure.scale == "diverging" else (0.0, 1.0)
    if measure.scale == "diverging":
        end = _quantile(numbers.abs(), _QUANTILE)
        return -end, end
    return _quantile(numbers, 1 - _QUANTILE), _quantile(numbers, _QUANTILE)


def _quantile(numbers: Tensor, share: float) -> float:
    """The nearest of the numbers. (torch.quantile refuses more than 16 million.)"""
    ordered = torch.sort(numbers).values
    return float(ordered[round(share * (len(ordered) - 1))])
