"""Rules of the estimator `vine`, whose values are mean rewards of continuations."""

from __future__ import annotations

from vapo.config.algorithm import VineOptions
from vapo.config.continuation_rules import bad_pattern, unlike_the_rollouts
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig

_KEY = "algorithm.advantage_estimator"


def vine_can_continue(config: FitConfig) -> Problem | None:
    if not isinstance(config.algorithm, VineOptions):
        return None
    return unlike_the_rollouts(config, _KEY)


def vine_pattern_is_one(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    if not isinstance(algorithm, VineOptions):
        return None
    return bad_pattern("algorithm.vine_segments", algorithm.vine_segments)


def vine_is_undiscounted(config: FitConfig) -> Problem | None:
    """A step's advantage is a difference of mean rewards, however many tokens it has."""
    algorithm = config.algorithm
    if not isinstance(algorithm, VineOptions) or algorithm.gamma == 1:
        return None
    return Problem(
        (_KEY, "algorithm.gamma"),
        f"{_KEY} vine compares the mean rewards of continuations, which are not discounted, and "
        f"algorithm.gamma is {algorithm.gamma:g}: set algorithm.gamma=1",
    )


VINE_RULES: tuple[Rule, ...] = (vine_can_continue, vine_pattern_is_one, vine_is_undiscounted)
