"""The most that estimator vine samples beside an iteration's responses."""

from __future__ import annotations

from typing import NamedTuple

from vapo.config.algorithm import VineOptions
from vapo.config.hyperparameters import resolve
from vapo.config.schema import FitConfig
from vapo.config.segments import TokenSegments


class MostContinuations(NamedTuple):
    """What estimator vine samples beside an iteration's responses, over all processes."""

    num_steps: int
    num_prefixes: int
    num_responses: int
    num_tokens: int


def most_continuations(config: FitConfig) -> MostContinuations | None:
    """Where responses and continuations are as long as they may be; None without vine.

    Steps are as many as they may be, and evenly spread. Prompts are continued once for a group,
    and no two responses begin alike.
    """
    options, numbers = config.algorithm, resolve(config)
    if not isinstance(options, VineOptions):
        return None
    segments, length = options.vine_segments, config.rollouts.max_response_tokens
    starts = range(0, length, segments.num_tokens if isinstance(segments, TokenSegments) else 1)
    num_steps = min(len(starts), segments.max_segments)
    left = [length - starts[i * len(starts) // num_steps] for i in range(1, num_steps)]
    groups, responses = numbers.num_prompts, numbers.num_prompts * numbers.group_size
    prefixes = groups + responses * len(left)
    tokens = groups * length + responses * sum(left)
    times = options.vine_continuations
    return MostContinuations(num_steps, prefixes, prefixes * times, tokens * times)
