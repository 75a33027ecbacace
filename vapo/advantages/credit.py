"""Rewards on tokens, and the places to which values and advantages belong: tokens, or turns."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.config import FitConfig, Hyperparameters
from vapo.config.schema import AlgorithmConfig
from vapo.functional.advantages import (
    decoupled_gae,
    length_adaptive_lambda,
    length_geometric_lambda,
    monte_carlo_returns,
)
from vapo.functional.columns import placed_rewards
from vapo.functional.losses import kl_penalty
from vapo.functional.masking import last_column, zero_outside
from vapo.functional.turn_advantages import decoupled_turn_gae, on_whole_turns
from vapo.types import EvaluatedBatch, RolloutBatch, TrainingBatch


def rewards_on_tokens(
    batch: EvaluatedBatch, algorithm: AlgorithmConfig, rewards: Float[Tensor, " B"] | None = None
) -> Float[Tensor, "B T"]:
    """The rewards on their tokens, less the KL penalty if it goes there.

    Reference log-probs are there only while the policy is trained; before that the policy is
    the reference, and the penalty 0.

    Args:
        rewards: in place of the batch's.
    """
    final = batch.rewards if rewards is None else rewards
    token_rewards = placed_rewards(batch, final)
    if algorithm.kl.placement == "reward" and batch.ref_logprobs is not None:
        assert batch.old_logprobs is not None
        penalty = kl_penalty(
            batch.old_logprobs, batch.ref_logprobs, estimator=algorithm.kl.estimator
        )
        token_rewards = token_rewards - algorithm.kl.coef * zero_outside(
            penalty, batch.response_mask
        )
    return token_rewards


def critic_rewards(batch: RolloutBatch, config: FitConfig) -> Float[Tensor, " B"]:
    """The rewards of the value targets: the batch's, or those without the overlong punishment.

    Source: JustRL-II.
    """
    return batch.rewards if config.critic.reward == "shaped" else batch.unshaped_rewards


def bootstrap_truncated_rewards(
    batch: EvaluatedBatch, rewards: Float[Tensor, " B"], hyperparameters: Hyperparameters
) -> Float[Tensor, " B"]:
    """Put the value of a truncated response's last state in the place of its reward.

        r_l <- gamma * V(s_l)        l its last token, so that delta_l = (gamma - 1) * V(s_l)

    Over turns l is the last turn. What an environment gave for the turns before it stays. The last
    turn's own reward goes, whether it was cut or the episode after it: V(s_l) has it in it.

    Source: EGAE (T-PPO, arXiv 2506.15050), where a response that is cut has no reward. Kept, the
    reward would count beside the value of the same future, and a target V(s_l) + r trained on
    would run away.
    """
    last = last_column(value_places(batch, hyperparameters))[:, None]
    last_values = hyperparameters.gamma * batch.values.gather(1, last)[:, 0]
    last_turn_rewards = batch.turn_rewards.gather(1, last_column(batch.response_mask)[:, None])[
        :, 0
    ]
    last_values = last_values + (batch.turn_rewards.sum(dim=1) - last_turn_rewards)
    return torch.where(batch.is_truncated.to(last_values.device), last_values, rewards)


def value_places(batch: RolloutBatch, hyperparameters: Hyperparameters) -> Bool[Tensor, "B T"]:
    """The tokens before which a value is used and learned: all sampled ones, or turns' first."""
    return batch.turn_starts if hyperparameters.gae_over == "turns" else batch.response_mask


def num_gae_steps(batch: RolloutBatch, hyperparameters: Hyperparameters) -> Int[Tensor, " B"]:
    """The length of each response in steps of gamma and lambda: sampled tokens, or turns."""
    return value_places(batch, hyperparameters).sum(dim=1)


def policy_lambda(
    batch: RolloutBatch, hyperparameters: Hyperparameters
) -> float | Float[Tensor, "B 1"]:
    """The policy's lambda: one constant, or one number a response, by its tokens or turns."""
    hp, lengths = hyperparameters, num_gae_steps(batch, hyperparameters)
    if hp.k is not None:
        return length_geometric_lambda(lengths, k=hp.k)
    return hp.lambda_policy if hp.alpha is None else length_adaptive_lambda(lengths, alpha=hp.alpha)


def gae_lambdas(batch: TrainingBatch, hyperparameters: Hyperparameters) -> Float[Tensor, "B 1"]:
    """The lambda with which each response's advantages were made, in float64.

    A trusted baseline raises the config's; before the policy trains it is the config's.
    """
    lambdas: float | Tensor | None = batch.policy_lambdas
    if lambdas is None:
        lambdas = policy_lambda(batch, hyperparameters)
    column = torch.as_tensor(lambdas, dtype=torch.float64, device=batch.response_mask.device)
    return column.reshape(-1, 1).expand(len(batch), 1)


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
    no_values = token_rewards.new_zeros(()).expand_as(token_rewards)
    _, returns = advantages_and_targets(
        batch, token_rewards, no_values, hyperparameters, lambda_policy=1.0, lambda_critic=1.0
    )
    return returns


def received_rewards(
    batch: RolloutBatch, token_rewards: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """The rewards of a response before each sampled token, where gamma is 1; 0 elsewhere."""
    to_come = monte_carlo_returns(token_rewards, batch.response_mask, gamma=1.0)
    return zero_outside(token_rewards.sum(dim=1, keepdim=True) - to_come, batch.response_mask)


def of_steps(
    x: Float[Tensor, "B T"], batch: RolloutBatch, hyperparameters: Hyperparameters
) -> Float[Tensor, "B T"]:
    """Values or returns as every token has them: of turns that of the token's turn."""
    if hyperparameters.gae_over == "tokens":
        return x
    return on_whole_turns(x, batch.response_mask, batch.turn_starts)
