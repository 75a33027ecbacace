"""The most rows and tokens that a config asks of a process at once."""

from __future__ import annotations

import math
from typing import NamedTuple

from vapo.config import FitConfig, resolve


class Lengths(NamedTuple):
    """A batch in the worst case: `rows` responses of one length to `prompts` prompts of one length.

    There are fewer prompts than rows if responses share the forward of their prompt.
    """

    rows: int
    prompt_tokens: int
    response_tokens: int
    prompts: int

    @property
    def num_tokens(self) -> int:
        return self.prompts * self.prompt_tokens + self.rows * self.response_tokens


def num_processes(config: FitConfig) -> int:
    return config.trainer.devices * config.trainer.num_nodes


def longest_rows(config: FitConfig, num_rows: int, *, shares_prompts: bool = False) -> Lengths:
    """Return the sizes of `num_rows` responses of a process if all are as long as they may be.

    With shared prompts, the responses answer as many different prompts as the process has.
    """
    prompts = num_rows
    if shares_prompts:
        prompts = min(num_rows, local_rollouts(config) // resolve(config).group_size)
    prompt, response = config.data.max_prompt_tokens, config.rollouts.max_response_tokens
    return Lengths(num_rows, prompt, response, prompts)


def worst_microbatch(config: FitConfig, num_rows: int, *, shares_prompts: bool = False) -> Lengths:
    """Return the micro-batch that needs the most memory, made of up to `num_rows` responses.

    If all of them at full length exceed `training.first_microbatch_tokens`, prompts and responses
    are shortened so that the batch fills this limit. With shared prompts, each prompt then has its
    whole group of responses, or as many as reach the limit at full length if these are fewer. One
    response with its prompt is never shortened, even above the limit.
    """
    rows = longest_rows(config, num_rows, shares_prompts=shares_prompts)
    _, prompt, response, _ = rows
    budget = config.training.first_microbatch_tokens
    group_size = resolve(config).group_size if shares_prompts else 1
    if rows.num_tokens <= budget:
        return rows
    if budget <= prompt + response:
        return Lengths(1, prompt, response, 1)
    num_shared = min(group_size, num_rows, math.ceil((budget - prompt) / response))
    longest = prompt + num_shared * response
    count = math.ceil(budget / longest)
    width = budget // count
    short_prompt = max(prompt * width // longest, 1)
    return Lengths(count * num_shared, short_prompt, (width - short_prompt) // num_shared, count)


def local_rollouts(config: FitConfig) -> int:
    """Return the number of responses that each process has in an iteration."""
    numbers = resolve(config)
    return numbers.num_prompts * numbers.group_size // num_processes(config)


def local_minibatch(config: FitConfig, network: str) -> int:
    """Return the number of responses in each process's minibatch.

    Args:
        network: "actor" or "critic".
    """
    size = config.training.minibatch_size
    if network == "critic":
        if config.critic.num_minibatches is not None:
            return local_rollouts(config) // config.critic.num_minibatches
        size = config.critic.minibatch_size or size
    return local_rollouts(config) if size is None else size // num_processes(config)
