"""The advantage stage: rewards and values of a rollout batch to advantages and value targets."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from vapo.config import Hyperparameters
from vapo.config.schema import AlgorithmConfig
from vapo.distributed import sum_over_ranks
from vapo.functional.advantages import (
    decoupled_gae,
    group_relative_advantages,
    leave_one_out_advantages,
    length_adaptive_lambda,
    monte_carlo_returns,
    whiten,
)
from vapo.functional.losses import kl_penalty
from vapo.functional.masking import place_at_last_token
from vapo.types import RolloutBatch


def token_rewards(batch: RolloutBatch, algorithm: AlgorithmConfig) -> Float[Tensor, "B T"]:
    """The response's reward on its last sampled token, less the KL penalty if it goes there.

    Reference log-probs are there only while the policy is trained; before that the policy is
    the reference, and the penalty 0.
    """
    rewards = place_at_last_token(batch.rewards, batch.response_mask)
    if algorithm.kl.placement == "reward" and batch.ref_logprobs is not None:
        assert batch.old_logprobs is not None
        penalty = kl_penalty(
            batch.old_logprobs, batch.ref_logprobs, estimator=algorithm.kl.estimator
        )
        rewards = rewards - algorithm.kl.coef * penalty * batch.response_mask
    return rewards


def policy_lambda(
    batch: RolloutBatch, hyperparameters: Hyperparameters
) -> float | Float[Tensor, "B 1"]:
    """The policy's lambda: one constant, or one number a response."""
    if hyperparameters.alpha is None:
        return hyperparameters.lambda_policy
    return length_adaptive_lambda(batch.response_lengths, alpha=hyperparameters.alpha)


def set_monte_carlo_targets(batch: RolloutBatch, gamma: float) -> None:
    """Value pretraining: the value targets are the Monte-Carlo returns of the fixed policy."""
    assert batch.token_rewards is not None
    batch.value_targets = monte_carlo_returns(batch.token_rewards, batch.response_mask, gamma=gamma)


def set_advantages(
    batch: RolloutBatch, hyperparameters: Hyperparameters, algorithm: AlgorithmConfig
) -> None:
    """Fill `raw_advantages`, `advantages`, and `value_targets` where a critic is trained."""
    hp = hyperparameters
    assert batch.token_rewards is not None
    if algorithm.advantage_estimator == "gae":
        assert batch.old_values is not None
        lambda_policy = policy_lambda(batch, hp)
        advantages, batch.value_targets = decoupled_gae(
            batch.token_rewards,
            batch.old_values,
            batch.response_mask,
            gamma=hp.gamma,
            lambda_policy=lambda_policy,
            lambda_critic=lambda_policy if hp.lambda_critic is None else hp.lambda_critic,
        )
    else:
        estimate = {
            "group_relative": group_relative_advantages,
            "leave_one_out": leave_one_out_advantages,
        }[algorithm.advantage_estimator]
        returns = batch.token_rewards.sum(dim=1)
        per_response = estimate(returns, group_size=batch.group_size)
        advantages = per_response[:, None] * batch.response_mask
    batch.raw_advantages = batch.advantages = advantages
    if algorithm.whiten_advantages:
        batch.advantages = whiten(advantages, batch.response_mask, reduce=sum_over_ranks)
