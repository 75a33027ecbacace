"""Put rewards on tokens, and compute advantages and returns over tokens or over whole turns."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.config import FitConfig, Hyperparameters, resolve
from vapo.config.schema import AlgorithmConfig
from vapo.functional.advantages import (
    decoupled_gae,
    length_adaptive_lambda,
    length_geometric_lambda,
    monte_carlo_returns,
    whiten,
)
from vapo.functional.columns import placed_rewards
from vapo.functional.losses import kl_penalty
from vapo.functional.masking import last_column, zero_outside
from vapo.functional.turn_advantages import decoupled_turn_gae, on_whole_turns
from vapo.system.distributed import sum_over_ranks
from vapo.types import EvaluatedBatch, RolloutBatch, TrainingBatch


def rewards_on_tokens(
    batch: EvaluatedBatch, algorithm: AlgorithmConfig, rewards: Float[Tensor, " B"] | None = None
) -> Float[Tensor, "B T"]:
    """Return rewards of tokens: each response's reward on its last token, or turns' on theirs.

    If the config makes the KL penalty a part of the reward, each token's penalty is subtracted. The
    batch has reference log-probs only while the policy is trained. Before that the policy is the
    reference, and the penalty is 0.

    Args:
        rewards: the responses' rewards; None: those of the batch.
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
    """Return the rewards that the critic learns to predict.

    `critic.reward` says whether they contain the punishment of overlong responses.

    Source: JustRL-II.
    """
    return batch.rewards if config.critic.reward == "shaped" else batch.unshaped_rewards


def bootstrap_truncated_rewards(
    batch: EvaluatedBatch, rewards: Float[Tensor, " B"], hyperparameters: Hyperparameters
) -> Float[Tensor, " B"]:
    """Return the responses' rewards, in which a value replaces the reward of a truncated response.

        r_l <- gamma * V(s_l)        l its last token, so that delta_l = (gamma - 1) * V(s_l)

    Over turns, l is the last turn. The rewards of earlier turns stay. The last turn's own reward is
    dropped, whether the turn or the episode after it was cut: V(s_l) already predicts it.

    Source: EGAE (T-PPO, arXiv 2506.15050), where a response that is cut has no reward. A reward
    that was kept would count in addition to the value of the same future, and training on a target
    V(s_l) + r would diverge.
    """
    last = last_column(value_token_mask(batch, hyperparameters))[:, None]
    last_values = hyperparameters.gamma * batch.values.gather(1, last)[:, 0]
    last_turn_rewards = batch.turn_rewards.gather(1, last_column(batch.response_mask)[:, None])[
        :, 0
    ]
    last_values = last_values + (batch.turn_rewards.sum(dim=1) - last_turn_rewards)
    return torch.where(batch.is_truncated.to(last_values.device), last_values, rewards)


def value_token_mask(batch: RolloutBatch, hyperparameters: Hyperparameters) -> Bool[Tensor, "B T"]:
    """Mark the tokens before which a value is used and learned.

    These are all sampled tokens, or if GAE steps over turns the first token of each turn.
    """
    return batch.turn_starts if hyperparameters.gae_over == "turns" else batch.response_mask


def num_gae_steps(batch: RolloutBatch, hyperparameters: Hyperparameters) -> Int[Tensor, " B"]:
    """Count each response's steps of GAE: its sampled tokens, or its turns."""
    return value_token_mask(batch, hyperparameters).sum(dim=1)


def policy_lambda(
    batch: RolloutBatch, hyperparameters: Hyperparameters
) -> float | Float[Tensor, "B 1"]:
    """Return the lambda of the policy's advantages: a constant, or a number for each response.

    With `alpha` or `k` in the config it depends on the response's length in steps of GAE.
    """
    hp, lengths = hyperparameters, num_gae_steps(batch, hyperparameters)
    if hp.k is not None:
        return length_geometric_lambda(lengths, k=hp.k)
    return hp.lambda_policy if hp.alpha is None else length_adaptive_lambda(lengths, alpha=hp.alpha)


def gae_lambdas(batch: TrainingBatch, hyperparameters: Hyperparameters) -> Float[Tensor, "B 1"]:
    """Return the lambda with which each response's advantages were made, in float64.

    It is the config's lambda (`policy_lambda`), unless a trusted baseline has raised it. In value
    pretraining there are no advantages, and the config's lambda is returned.
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
    """Return GAE's advantages and value targets, with a lambda for each.

    `gae_over` says whether GAE steps over tokens or over turns. A turn's value target is on its
    first token alone, and its advantage is on all of its tokens.
    """
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
    """Return the Monte-Carlo return at each token that has a value (`value_token_mask`), else 0."""
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
    """Return the undiscounted sum of a response's rewards before each sampled token; else 0."""
    to_come = monte_carlo_returns(token_rewards, batch.response_mask, gamma=1.0)
    return zero_outside(token_rewards.sum(dim=1, keepdim=True) - to_come, batch.response_mask)


def spread_over_steps(
    x: Float[Tensor, "B T"], batch: RolloutBatch, hyperparameters: Hyperparameters
) -> Float[Tensor, "B T"]:
    """Return values or returns x for every sampled token.

    If GAE steps over turns, only a turn's first token has a number in x. All of the turn's tokens
    get it.
    """
    if hyperparameters.gae_over == "tokens":
        return x
    return on_whole_turns(x, batch.response_mask, batch.turn_starts)


def whitened(
    advantages: Float[Tensor, "B T"],
    batch: EvaluatedBatch,
    token_rewards: Float[Tensor, "B T"],
    config: FitConfig,
) -> Float[Tensor, "B T"]:
    """Return the advantages shifted and scaled to mean 0 and variance 1 (`functional.whiten`).

    Mean and variance are over all ranks' tokens in `counted_mask`. By the returns of
    `token_rewards`, whitening recognizes advantages that are only noise or small, which are not
    scaled up, as far as the config says so. Every rank must call this.
    """
    hp, algorithm = resolve(config), config.algorithm
    return whiten(
        advantages,
        batch.counted_mask,
        returns=spread_over_steps(achieved_returns(batch, token_rewards, hp), batch, hp),
        floor=algorithm.whitening_floor,
        needs_contrast=not algorithm.reads_other_rewards,
        reduce=sum_over_ranks,
    )
