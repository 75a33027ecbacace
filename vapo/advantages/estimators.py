"""The advantage stage: from rewards and values to advantages and value targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.contract import Estimate, Estimator, user_estimator
from vapo.advantages.credit import (
    achieved_returns,
    advantages_and_targets,
    bootstrap_truncated_rewards,
    critic_rewards,
    policy_lambda,
    rewards_on_tokens,
    value_token_mask,
    whitened,
)
from vapo.advantages.oppo import with_success_values
from vapo.advantages.poise import Baseline
from vapo.advantages.trusted_baseline import TrustedBaseline
from vapo.advantages.value_loss_columns import anchor_token_mask, pretraining_columns, value_weights
from vapo.config import FitConfig, Hyperparameters, resolve
from vapo.config.estimators import OppoOptions, OtbOptions
from vapo.config.hyperparameters import critic_is_punished
from vapo.config.schema import AlgorithmConfig
from vapo.functional.advantages import (
    gae,
    monte_carlo_returns,
)
from vapo.functional.baselines import (
    correct_only_advantages,
    greedy_baseline_advantages,
    group_mean_advantages,
    group_relative_advantages,
    group_relative_apart_advantages,
    leave_one_out_advantages,
    step_advantages,
    whitened_group_mean_advantages,
)
from vapo.functional.token_baselines import optimal_token_advantages
from vapo.system.distributed import sum_over_ranks
from vapo.types import EvaluatedBatch, Phase, RolloutBatch, TrainingBatch


def gae_estimate(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """Return GAE's advantages and value targets from the critic's values (PPO, VC-PPO, VAPO).

    This is the only shipped estimator that trains a critic.
    """
    hp, lambda_policy = hyperparameters, policy_lambda(batch, hyperparameters)
    advantages, value_targets = advantages_and_targets(
        batch,
        token_rewards,
        batch.values,
        hp,
        lambda_policy=lambda_policy,
        lambda_critic=lambda_policy if hp.lambda_critic is None else hp.lambda_critic,
    )
    return Estimate(advantages, value_targets)


def reward_to_go(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """Return as advantages the sums of rewards from each token on (REINFORCE++).

    Whitening later subtracts their mean, which is the baseline.
    """
    gamma = hyperparameters.gamma
    return Estimate(monte_carlo_returns(token_rewards, batch.response_mask, gamma=gamma))


def greedy_baseline(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """Return as advantages rewards less the reward of the prompt's greedy response (ReMax)."""
    assert batch.baseline_rewards is not None
    return on_every_token(
        batch, greedy_baseline_advantages(token_rewards.sum(dim=1), batch.baseline_rewards)
    )


def correct_only(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """Return the advantage 1 for correct responses, and keep only these (RAFT)."""
    estimate = on_every_token(batch, correct_only_advantages(batch.is_correct))
    return estimate._replace(kept=batch.is_correct)


def vine(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """Return as advantages by how much each step changes the expected reward (VinePPO).

    A step is a part of a response. The expected rewards are `step_values`, which continuations have
    measured.
    """
    assert batch.step_values is not None
    assert batch.step_starts is not None
    return Estimate(
        step_advantages(token_rewards, batch.step_values, batch.step_starts, batch.response_mask)
    )


def gae_of_step_values(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """Return GAE's advantages from `step_values`, the values of milestones or of OPPO.

    No network computes these values, so there are no value targets.
    """
    assert batch.step_values is not None
    columns = (token_rewards, batch.step_values, batch.response_mask)
    lambda_ = policy_lambda(batch, hyperparameters)
    return Estimate(gae(*columns, gamma=hyperparameters.gamma, lambda_=lambda_))


def optimal_token_baseline(
    batch: EvaluatedBatch,
    token_rewards: Float[Tensor, "B T"],
    hyperparameters: Hyperparameters,
    *,
    alone: Literal["others_mean", "zero"] = "others_mean",
) -> Estimate:
    """Return advantages against the optimal token baseline (OTB, `optimal_token_advantages`).

    `alone` is the baseline of a token where no other response of the group is as long.
    """
    assert batch.old_logprobs is not None
    assert batch.old_collisions is not None
    columns = (token_rewards, batch.old_logprobs, batch.old_collisions, batch.response_mask)
    sizes: dict[str, Any] = {"group_size": batch.group_size, "gamma": hyperparameters.gamma}
    return Estimate(optimal_token_advantages(*columns, **sizes, alone=alone))


def on_every_token(batch: RolloutBatch, per_response: Float[Tensor, " B"]) -> Estimate:
    """Return an estimate in which each response's number is the advantage of all of its tokens."""
    return Estimate(per_response[:, None] * batch.response_mask)


def _group_estimator(advantages: Callable[..., Tensor]) -> Estimator:
    """Return an estimator that compares the rewards of the responses to one prompt.

    `advantages` turns the rewards [B] of groups into one advantage for each response.
    """

    def estimate(
        batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
    ) -> Estimate:
        rewards = token_rewards.sum(dim=1)
        return on_every_token(batch, advantages(rewards, group_size=batch.group_size))

    return estimate


def group_mean_whitened(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """Return as advantages rewards less their group's mean, scaled to variance 1.

    This is REINFORCE++-baseline. The variance is over the responses of all ranks except fillers.
    """
    scored = whitened_group_mean_advantages(
        token_rewards.sum(dim=1),
        group_size=batch.group_size,
        counted=~batch.is_filler,
        reduce=sum_over_ranks,
    )
    return on_every_token(batch, scored)


def group_relative_apart(
    batch: EvaluatedBatch, token_rewards: Float[Tensor, "B T"], hyperparameters: Hyperparameters
) -> Estimate:
    """Return GDPO's advantages, which weigh several verifiers.

    Each verifier's rewards are normalized within their group, and summed with the weights of
    `rewards.verifiers`. The sums are then scaled to variance 1 over the responses of all ranks
    except fillers. `token_rewards` are not read: the rewards are those in the rollouts' verdicts.
    """
    weights = hyperparameters.verifier_weights
    rewards = [[r.by_verifier[name]["reward"] for name in weights] for r in batch.rollouts]
    scored = group_relative_apart_advantages(
        torch.tensor(rewards),
        torch.tensor(list(weights.values())),
        group_size=batch.group_size,
        counted=~batch.is_filler,
        reduce=sum_over_ranks,
    )
    return on_every_token(batch, scored)


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae_estimate,
    "group_relative": _group_estimator(group_relative_advantages),  # GRPO, DAPO
    "group_relative_apart": group_relative_apart,  # GDPO
    "group_mean": _group_estimator(group_mean_advantages),  # Dr.GRPO
    "group_mean_whitened": group_mean_whitened,  # REINFORCE++-baseline
    "leave_one_out": _group_estimator(leave_one_out_advantages),  # RLOO
    # POISE's first iterations; later its baseline makes the advantages
    "poise": _group_estimator(leave_one_out_advantages),
    "reward_to_go": reward_to_go,
    "greedy_baseline": greedy_baseline,
    "correct_only": correct_only,
    "vine": vine,
    "milestones": gae_of_step_values,
    "oppo": gae_of_step_values,
    "otb": optimal_token_baseline,
}


def estimator_of(algorithm: AlgorithmConfig) -> Estimator:
    """Return the advantage estimator that the config names.

    Raises: UserError: the config names a user's function that cannot be imported or called.
    """
    if algorithm.advantage_estimator == "function":
        return user_estimator(algorithm)
    if isinstance(algorithm, OtbOptions):
        return partial(optimal_token_baseline, alone=algorithm.otb.alone)
    return ESTIMATORS[algorithm.advantage_estimator]


def estimate_advantages(
    batch: EvaluatedBatch, phase: Phase, config: FitConfig, baseline: Baseline | None = None
) -> TrainingBatch:
    """Return the batch with token rewards, and with the advantages and value targets of the phase.

    In value pretraining there are no advantages, and the value targets are the Monte-Carlo returns
    of the fixed policy, averaged with those of continuations if the batch has some. Rows that an
    estimator does not keep carry no loss. Every rank must call this.

    Args:
        baseline: changes the advantages that GAE or POISE's estimator has made, or replaces them;
            None: they stay as they are.
    """
    hp, algorithm = resolve(config), config.algorithm
    if isinstance(algorithm, OppoOptions):
        batch = with_success_values(batch, algorithm.oppo, config.rewards)
    rewards, targets_rewards = policy_and_critic_rewards(batch, config)
    columns: dict[str, Any] = {
        **vars(batch),
        "token_rewards": rewards,
        "value_rewards": targets_rewards,
        "importance_weights": torch.ones_like(batch.rollout_logprobs),
        "value_weights": value_weights(batch, config),
        "value_draws": torch.ones_like(batch.rollout_logprobs),
    }
    if config.critic.bootstrap_truncated:
        rewards, targets_rewards = policy_and_critic_rewards(batch, config, bootstraps=True)
    if phase is Phase.VALUE_PRETRAINING:
        if isinstance(baseline, TrustedBaseline):
            baseline.learn(batch, targets_rewards, hp)
        targets = achieved_returns(batch, targets_rewards, hp)
        columns |= pretraining_columns(batch, targets, config.components.value_pretraining)
        columns["value_mask"] = columns["value_mask"] & value_token_mask(batch, hp)
        return TrainingBatch(**columns, policy_mask=batch.loss_mask, entropy_mask=batch.loss_mask)
    if algorithm.read_layers:  # the update does not read them
        columns["actor_states"] = None
    estimate = estimator_of(algorithm)(batch, rewards, hp)
    if targets_rewards is not rewards:  # the estimator is gae: critic_rules
        critic_estimate = gae_estimate(batch, targets_rewards, hp)
        estimate = estimate._replace(value_targets=critic_estimate.value_targets)
    raw = advantages = estimate.advantages
    if algorithm.uses_gae and not isinstance(baseline, TrustedBaseline):
        lambdas = torch.as_tensor(policy_lambda(batch, hp), device=raw.device)
        columns["policy_lambdas"] = lambdas.reshape(-1).expand(len(batch))
    if isinstance(baseline, TrustedBaseline):
        trusted = baseline.estimate(batch, rewards, targets_rewards, hp)
        raw = advantages = trusted.advantages
        columns |= {"policy_lambdas": trusted.lambdas, "baseline_values": trusted.values}
    elif baseline is not None and algorithm.advantage_estimator in ("gae", "poise"):
        raw = advantages = baseline.weigh(
            advantages, batch, rewards, targets_rewards, gamma=hp.gamma
        )
    if algorithm.whiten_advantages:
        advantages = whitened(advantages, batch, columns["token_rewards"], config)
    columns["value_mask"] = anchor_token_mask(batch, config.critic) & value_token_mask(batch, hp)
    if estimate.kept is not None:
        for name in ("loss_mask", "value_mask"):
            columns[name] = columns[name] & estimate.kept[:, None]
    return TrainingBatch(
        **columns,
        policy_mask=columns["loss_mask"],
        entropy_mask=columns["loss_mask"],
        raw_advantages=raw,
        advantages=advantages,
        value_targets=estimate.value_targets,
    )


def policy_and_critic_rewards(
    batch: EvaluatedBatch, config: FitConfig, *, bootstraps: bool = False
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Return the token rewards of which advantages are made, and those of value targets.

    If they are equal, both are one tensor.

    Args:
        bootstraps: whether truncated responses get the value of their last state as reward.
    """
    is_one = critic_is_punished(config) or not config.rewards.overlong.soft_punishment
    finals = (batch.rewards, critic_rewards(batch, config))
    if bootstraps:
        hp = resolve(config)
        finals = (
            bootstrap_truncated_rewards(batch, finals[0], hp),
            bootstrap_truncated_rewards(batch, finals[1], hp),
        )
    policy = rewards_on_tokens(batch, config.algorithm, finals[0])
    return policy, policy if is_one else rewards_on_tokens(batch, config.algorithm, finals[1])
