"""Rules of what samples on from prefixes: the step boundaries, and whose continuations they are."""

from __future__ import annotations

import re

from vapo.config.problem import Problem
from vapo.config.schema import FitConfig


def unlike_the_rollouts(config: FitConfig, key: str) -> Problem | None:
    """What makes a continuation's verdict another thing than the response's reward; `key` names
    what asks for continuations."""
    kl = config.algorithm.kl
    if kl.coef > 0 and kl.placement == "reward":
        return Problem(
            (key, "algorithm.kl.placement"),
            f"{key}: a continuation is worth its verdict, and algorithm.kl.placement is reward: "
            "set it to loss",
        )
    if config.rewards.shuffle:
        return Problem(
            (key, "rewards.shuffle"),
            f"{key}: rewards.shuffle deals the rewards out anew; set it to false",
        )
    if config.training.overlap_rollouts:
        return Problem(
            (key, "training.overlap_rollouts"),
            f"{key}: with training.overlap_rollouts the engine's weights are newer than those "
            "that sampled the responses; set it to false",
        )
    return None


def bad_pattern(key: str, pattern: str) -> Problem | None:
    """A regular expression that cannot be compiled, or matches nothing everywhere."""
    try:
        found = re.compile(pattern)
    except re.error as error:
        return Problem((key,), f"{key} {pattern!r} is not a regular expression: {error}")
    if found.match("") is not None:
        return Problem((key,), f"{key} {pattern!r} matches an empty text: every place would be one")
    return None
