"""The advantage stage: rewards and values of a rollout batch to advantages and value targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor

from vapo.advantages.contract import Estimate, Estimator, own_estimator
from vapo.config import Hyperparameters
from vapo.config.schema import AlgorithmConfig
from vapo.functional.advantages import (
    decoupled_gae,
    length_adaptive_lambda,
    monte_carlo_returns,
    whiten,
)
from vapo.functional.baselines import (
    correct_only_advantages,
    greedy_baseline_advantages,
    group_mean_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    whitened_group_mean_advantages,
)
from vapo.functional.losses import kl_penalty
from vapo.functional.masking import place_at_last_token, zero_outside
from vapo.system.distributed import sum_over_ranks
from vapo.types import EvaluatedBatch, Phase, RolloutBatch, TrainingBatch


def token_rewards(batch: EvaluatedBatch, algorithm: AlgorithmConfig) -> Float[Tensor, "B T"]:
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
        rewards = rewards - algorithm.kl.coef * zero_outside(penalty, batch.response_mask)
    return rewards


def policy_lambda(
    batch: RolloutBatch, hyperparameters: Hyperparameters
) -> float | Float[Tensor, "B 1"]:
    """The policy's lambda: one constant, or one number a response."""
    if hyperparameters.alpha is None:
        return hyperparameters.lambda_policy
    return length_adaptive_lambda(batch.response_lengths, alpha=hyperparameters.alpha)


def gae(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """PPO, VC-PPO, VAPO: the only one with values."""
    assert batch.old_values is not None
    hp, lambda_policy = hyperparameters, policy_lambda(batch, hyperparameters)
    advantages, value_targets = decoupled_gae(
        token_rewards,
        batch.old_values,
        batch.response_mask,
        gamma=hp.gamma,
        lambda_policy=lambda_policy,
        lambda_critic=lambda_policy if hp.lambda_critic is None else hp.lambda_critic,
    )
    return Estimate(advantages, value_targets)


def reward_to_go(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """REINFORCE++; its baseline is the batch's mean, taken by whitening."""
    gamma = hyperparameters.gamma
    return Estimate(monte_carlo_returns(token_rewards, batch.response_mask, gamma=gamma))


def greedy_baseline(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """ReMax."""
    assert batch.baseline_rewards is not None
    return on_every_token(
        batch, greedy_baseline_advantages(token_rewards.sum(dim=1), batch.baseline_rewards)
    )


def correct_only(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """RAFT."""
    estimate = on_every_token(batch, correct_only_advantages(batch.is_correct))
    return estimate._replace(kept=batch.is_correct)


def on_every_token(batch: RolloutBatch, per_response: Float[Tensor, " B"]) -> Estimate:
    """One number a response is the advantage of each of its tokens."""
    return Estimate(per_response[:, None] * batch.response_mask)


def _of_groups(advantages: Callable[..., Tensor]) -> Estimator:
    """Make the estimator that compares the rewards of the responses to one prompt."""

    def estimate(
        batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
    ) -> Estimate:
        rewards = token_rewards.sum(dim=1)
        return on_every_token(batch, advantages(rewards, group_size=batch.group_size))

    return estimate


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "group_relative": _of_groups(group_relative_advantages),  # GRPO, DAPO
    "group_mean": _of_groups(group_mean_advantages),  # Dr.GRPO
    "group_mean_whitened": _of_groups(  # REINFORCE++-baseline
        partial(whitened_group_mean_advantages, reduce=sum_over_ranks)
    ),
    "leave_one_out": _of_groups(leave_one_out_advantages),  # RLOO
    "reward_to_go": reward_to_go,
    "greedy_baseline": greedy_baseline,
    "correct_only": correct_only,
}


def estimator_of(algorithm: AlgorithmConfig) -> Estimator:
    """The estimator that the config names.

    Raises:
        UserError: a function of the user's own that cannot be imported or called.
    """
    if algorithm.advantage_estimator == "function":
        return own_estimator(algorithm)
    return ESTIMATORS[algorithm.advantage_estimator]


def estimate_advantages(
    batch: EvaluatedBatch,
    phase: Phase,
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
) -> TrainingBatch:
    """The batch with token rewards, and the advantages and value targets that the phase trains on.

    In value pretraining the value targets are the Monte-Carlo returns of the fixed policy, and
    there are no advantages. Rows that an estimator does not keep lose their loss.
    """
    rewards = token_rewards(batch, algorithm)
    if phase is Phase.VALUE_PRETRAINING:
        targets = monte_carlo_returns(rewards, batch.response_mask, gamma=hyperparameters.gamma)
        return TrainingBatch(
            **vars(batch),
            token_rewards=rewards,
            policy_mask=batch.loss_mask,
            value_targets=targets,
        )
    estimate = estimator_of(algorithm)(batch, rewards, hyperparameters)
    advantages = estimate.advantages
    if algorithm.whiten_advantages:
        advantages = whiten(advantages, batch.response_mask, reduce=sum_over_ranks)
    loss_mask = batch.loss_mask
    if estimate.kept is not None:
        loss_mask = loss_mask & estimate.kept[:, None]
    return TrainingBatch(
        **{**vars(batch), "loss_mask": loss_mask},
        token_rewards=rewards,
        policy_mask=loss_mask,
        raw_advantages=estimate.advantages,
        advantages=advantages,
        value_targets=estimate.value_targets,
    )
