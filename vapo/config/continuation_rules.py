"""Rules of options that sample continuations of prefixes, and upper bounds on what they sample."""

from __future__ import annotations

from typing import NamedTuple

from vapo.config.estimators import VineOptions
from vapo.config.hyperparameters import resolve
from vapo.config.rules import Problem, Problems, bad_pattern
from vapo.config.schema import FitConfig
from vapo.config.values import PatternSegments, SegmentsConfig, TokenSegments


def truth_can_be_measured(config: FitConfig) -> Problems:
    truth = config.value_truth
    if truth.num_responses + truth.num_prefixes == 0:
        yield Problem(
            "value_truth.num_responses and value_truth.num_prefixes are both 0: there is nothing "
            "to measure; set one of them above 0"
        )
    yield from bad_segments("value_truth.segments", truth.segments)
    if truth.every_n_iterations is not None:
        yield from unlike_the_rollouts(config, "value_truth.every_n_iterations")


def unlike_the_rollouts(config: FitConfig, key: str, *, in_training: bool = True) -> Problems:
    """Yield a problem for each option that makes verdicts of continuations unlike rewards.

    `key` is the option that asks for continuations. Outside of training, staleness is allowed.
    """
    kl = config.algorithm.kl
    if kl.coef > 0 and kl.placement == "reward":
        yield Problem(
            f"{key}: a continuation is worth its verdict, but algorithm.kl.placement is reward: "
            "set it to loss"
        )
    if config.rewards.shuffle:
        yield Problem(f"{key}: rewards.shuffle deals the rewards out anew; set it to false")
    if in_training and config.training.max_staleness > 0:
        yield Problem(
            f"{key}: with training.max_staleness above 0 the engine's weights are newer than "
            "those that sampled the responses; set it to 0"
        )


def bad_segments(block: str, segments: SegmentsConfig) -> Problems:
    """Yield a problem if the pattern that ends a step is invalid or matches an empty text.

    Other kinds of segments have no pattern. `block` is the dotted key of `segments`.
    """
    if isinstance(segments, PatternSegments):
        import regex  # takes longer to load than the rest of the rules

        why = "matches an empty text: every place would be one"
        pattern = f"{block}.pattern", segments.pattern
        yield from bad_pattern(*pattern, lambda compiled: compiled.match("") is None, why, regex)


class MostContinuations(NamedTuple):
    """Upper bounds on the continuations that estimator vine samples in an iteration, on all ranks.

    `num_steps` counts the steps of one response, `num_prefixes` the texts that are continued,
    `num_responses` and `num_tokens` the continuations and their tokens.
    """

    num_steps: int
    num_prefixes: int
    num_responses: int
    num_tokens: int


def most_continuations(config: FitConfig) -> MostContinuations | None:
    """Return upper bounds on the continuations of an iteration; None without estimator vine.

    Each response is assumed to have the most steps, evenly spread. The prompt is continued once for
    its whole group, and no two responses are assumed to share a beginning.
    """
    options, numbers = config.algorithm, resolve(config)
    if not isinstance(options, VineOptions):
        return None
    segments, length = options.vine_segments, config.rollouts.max_response_tokens
    starts = range(0, length, segments.num_tokens if isinstance(segments, TokenSegments) else 1)
    num_steps = min(len(starts), segments.max_segments)
    tokens_left = [length - starts[i * len(starts) // num_steps] for i in range(1, num_steps)]
    groups, responses = numbers.num_prompts, numbers.num_prompts * numbers.group_size
    prefixes = groups + responses * len(tokens_left)
    tokens = groups * length + responses * sum(tokens_left)
    times = options.vine_continuations
    return MostContinuations(num_steps, prefixes, prefixes * times, tokens * times)
