"""Rewards on tokens: what advantages add up, and what value targets do."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.credit import value_places
from vapo.config import FitConfig, Hyperparameters
from vapo.config.schema import AlgorithmConfig
from vapo.functional.columns import placed_rewards
from vapo.functional.losses import kl_penalty
from vapo.functional.masking import last_column, zero_outside
from vapo.types import EvaluatedBatch, RolloutBatch


def token_rewards(
    batch: EvaluatedBatch,
    algorithm: AlgorithmConfig,
    rewards: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """The rewards on their tokens, less the KL penalty if it goes there.

    Reference log-probs are there only while the policy is trained; before that the policy is
    the reference, and the penalty 0.

    Args:
        rewards: in place of the batch's.
    """
    final = batch.rewards if rewards is None else rewards
    placed = placed_rewards(batch, final)
    if algorithm.kl.placement == "reward" and batch.ref_logprobs is not None:
        assert batch.old_logprobs is not None
        penalty = kl_penalty(
            batch.old_logprobs, batch.ref_logprobs, estimator=algorithm.kl.estimator
        )
        placed = placed - algorithm.kl.coef * zero_outside(penalty, batch.response_mask)
    return placed


def critic_rewards(batch: RolloutBatch, config: FitConfig) -> Float[Tensor, " B"]:
    """The rewards of the value targets: the batch's, or those without the overlong punishment.

    Source: JustRL-II.
    """
    return batch.rewards if config.critic.reward == "shaped" else batch.unshaped_rewards


def bootstrapped(
    batch: EvaluatedBatch, rewards: Float[Tensor, " B"], hyperparameters: Hyperparameters
) -> Float[Tensor, " B"]:
    """Put the value of a truncated response's last state in the place of its reward.

        r_l <- gamma * V(s_l)        l its last token, so that delta_l = (gamma - 1) * V(s_l)

    Over turns l is the last turn. What an environment gave for the turns stays: it was earned. A
    verifier judged the response as if it had ended.

    Source: EGAE (T-PPO, arXiv 2506.15050), where a response that is cut has no reward. Kept, the
    reward would count beside the value of the same future, and a target V(s_l) + r trained on
    would run away.
    """
    assert batch.old_values is not None
    last = last_column(value_places(batch, hyperparameters))[:, None]
    after = hyperparameters.gamma * batch.old_values.gather(1, last)[:, 0]
    is_earned = torch.tensor([rollout.in_environment for rollout in batch.rollouts])
    after = after + torch.where(is_earned.to(after.device), batch.turn_rewards.sum(dim=1), 0.0)
    return torch.where(batch.is_truncated.to(after.device), after, rewards)
