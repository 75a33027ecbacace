"""Rules of what samples on from prefixes: the step boundaries, and whose continuations they are."""

from __future__ import annotations

import regex

from vapo.config.patterns import pattern_of, shown_pattern
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig
from vapo.config.segments import PatternSegments, SegmentsConfig


def truth_is_of_verdicts(config: FitConfig) -> Problem | None:
    if config.value_truth.every_n_iterations is None:
        return None
    return unlike_the_rollouts(config, "value_truth.every_n_iterations")


def unlike_the_rollouts(config: FitConfig, key: str, *, in_training: bool = True) -> Problem | None:
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
    if in_training and config.training.max_staleness > 0:
        return Problem(
            (key, "training.max_staleness"),
            f"{key}: with training.max_staleness above 0 the engine's weights are newer than "
            "those that sampled the responses; set it to 0",
        )
    return None


def truth_has_prefixes(config: FitConfig) -> Problem | None:
    truth = config.value_truth
    if truth.num_responses + truth.num_prefixes > 0:
        return None
    return Problem(
        ("value_truth.num_responses", "value_truth.num_prefixes"),
        "value_truth.num_responses and value_truth.num_prefixes are both 0: there is nothing to "
        "measure; set one of them above 0",
    )


def truth_pattern_is_one(config: FitConfig) -> Problem | None:
    return bad_pattern("value_truth.segments", config.value_truth.segments)


def bad_pattern(block: str, segments: SegmentsConfig) -> Problem | None:
    """What is wrong with the regular expression that ends a step, if one does.

    It cannot be compiled, or it matches an empty text. `block` is the dotted key of `segments`.
    """
    if not isinstance(segments, PatternSegments):
        return None
    key, pattern = f"{block}.pattern", segments.pattern
    found = pattern_of(key, pattern, regex.compile)
    if isinstance(found, str):
        return Problem((key,), found)
    if found.match("") is None:
        return None
    shown = shown_pattern(pattern)
    return Problem((key,), f"{key} {shown} matches an empty text: every place would be one")


CONTINUATION_RULES: tuple[Rule, ...] = (
    truth_has_prefixes,
    truth_pattern_is_one,
    truth_is_of_verdicts,
)
