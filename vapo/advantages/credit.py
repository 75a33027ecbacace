"""What a value and an advantage belong to: a token, or a whole turn (`algorithm.gae_over`)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.config import Hyperparameters
from vapo.functional.advantages import decoupled_gae, monte_carlo_returns
from vapo.functional.turn_advantages import decoupled_turn_gae, on_whole_turns
from vapo.types import RolloutBatch


def value_places(batch: RolloutBatch, hyperparameters: Hyperparameters) -> Bool[Tensor, "B T"]:
    """The tokens before which a value is used and learned: all sampled ones, or turns' first."""
    return batch.turn_starts if hyperparameters.gae_over == "turns" else batch.response_mask


def num_steps(batch: RolloutBatch, hyperparameters: Hyperparameters) -> Int[Tensor, " B"]:
    """The length of each response in steps of gamma and lambda: sampled tokens, or turns."""
    return value_places(batch, hyperparameters).sum(dim=1)


def advantages_and_targets(
    batch: RolloutBatch,
    token_rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    hyperparameters: Hyperparameters,
    *,
    lambda_policy: float | Float[Tensor, "B 1"],
    lambda_critic: float | Float[Tensor, "B 1"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """GAE over tokens or turns. Value targets of turns stand on the turns' first tokens."""
    columns = (token_rewards, values, batch.response_mask)
    numbers: dict[str, Any] = {
        "gamma": hyperparameters.gamma,
        "lambda_policy": lambda_policy,
        "lambda_critic": lambda_critic,
    }
    if hyperparameters.gae_over == "turns":
        return decoupled_turn_gae(*columns, batch.turn_starts, **numbers)
    return decoupled_gae(*columns, **numbers)


def achieved_returns(
    batch: RolloutBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Float[Tensor, "B T"]:
    """The Monte-Carlo return from each value's place on, whatever the lambdas are; 0 elsewhere."""
    if hyperparameters.gae_over == "tokens":
        gamma = hyperparameters.gamma
        return monte_carlo_returns(token_rewards, batch.response_mask, gamma=gamma)
    none = token_rewards.new_zeros(()).expand_as(token_rewards)
    _, returns = advantages_and_targets(
        batch, token_rewards, none, hyperparameters, lambda_policy=1.0, lambda_critic=1.0
    )
    return returns


def of_steps(
    x: Float[Tensor, "B T"], batch: RolloutBatch, hyperparameters: Hyperparameters
) -> Float[Tensor, "B T"]:
    """Values or returns as every token has them: of turns that of the token's turn."""
    if hyperparameters.gae_over == "tokens":
        return x
    return on_whole_turns(x, batch.response_mask, batch.turn_starts)
