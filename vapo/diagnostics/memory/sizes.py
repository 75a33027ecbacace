"""The most rows and tokens that a config asks a process for at once."""

from __future__ import annotations

import math
from typing import NamedTuple

from vapo.config import FitConfig, resolve
from vapo.config.algorithm import VineOptions
from vapo.config.segments import TokenSegments


class Lengths(NamedTuple):
    """A micro-batch in the worst case."""

    rows: int
    prompt_tokens: int
    response_tokens: int


def num_processes(config: FitConfig) -> int:
    return config.trainer.devices * config.trainer.num_nodes


def worst_microbatch(config: FitConfig, num_rows: int) -> Lengths:
    """The most tokens that one forward of `num_rows` responses of a process may have."""
    prompt, response = config.data.max_prompt_tokens, config.rollouts.max_response_tokens
    longest, budget = prompt + response, config.training.microbatch_tokens
    if num_rows * longest <= budget or budget <= longest:
        return Lengths(num_rows if num_rows * longest <= budget else 1, prompt, response)
    rows = math.ceil(budget / longest)
    width = budget // rows
    short_prompt = max(prompt * width // longest, 1)
    return Lengths(rows, short_prompt, width - short_prompt)


def local_rollouts(config: FitConfig) -> int:
    numbers = resolve(config)
    return numbers.num_prompts * numbers.group_size // num_processes(config)


def local_minibatch(config: FitConfig, network: str) -> int:
    size = config.training.minibatch_size
    if network == "critic":
        if config.critic.num_minibatches is not None:
            return local_rollouts(config) // config.critic.num_minibatches
        size = config.critic.minibatch_size or size
    return local_rollouts(config) if size is None else size // num_processes(config)


class Continuations(NamedTuple):
    """What estimator vine samples beside an iteration's responses, over all processes."""

    num_steps: int
    num_prefixes: int
    num_responses: int
    num_tokens: int


def most_continuations(config: FitConfig) -> Continuations | None:
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
    return Continuations(num_steps, prefixes, prefixes * times, tokens * times)
