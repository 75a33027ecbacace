"""The most rows and tokens that a config asks a process for at once."""

from __future__ import annotations

import math
from typing import NamedTuple

from vapo.config import FitConfig, resolve


class Lengths(NamedTuple):
    """Rows in the worst case. `prompts` go through the network, of `rows` responses."""

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
    """The most tokens that `num_rows` responses of a process may have.

    Where prompts are shared, each response may answer another one as far as there are as many.
    """
    prompts = num_rows
    if shares_prompts:
        prompts = min(num_rows, local_rollouts(config) // resolve(config).group_size)
    prompt, response = config.data.max_prompt_tokens, config.rollouts.max_response_tokens
    return Lengths(num_rows, prompt, response, prompts)


def worst_microbatch(config: FitConfig, num_rows: int, *, shares_prompts: bool = False) -> Lengths:
    """The most tokens that one forward of `num_rows` responses of a process may have.

    Where prompts are shared and the budget is full, the most of it are responses where whole
    groups lie together.
    """
    rows = longest_rows(config, num_rows, shares_prompts=shares_prompts)
    _, prompt, response, _ = rows
    budget = config.training.first_microbatch_tokens
    group_size = resolve(config).group_size if shares_prompts else 1
    if rows.num_tokens <= budget:
        return rows
    if budget <= prompt + response:
        return Lengths(1, prompt, response, 1)
    together = min(group_size, num_rows, math.ceil((budget - prompt) / response))
    longest = prompt + together * response
    count = math.ceil(budget / longest)
    width = budget // count
    short_prompt = max(prompt * width // longest, 1)
    return Lengths(count * together, short_prompt, (width - short_prompt) // together, count)


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
