"""The columns of the critic's loss: targets, weights of responses, and the tokens that carry it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.advantages.credit import critic_rewards, received_rewards, rewards_on_tokens
from vapo.config import FitConfig
from vapo.config.components import ValuePretraining
from vapo.config.critic import CriticConfig, value_range
from vapo.config.hyperparameters import critic_is_punished
from vapo.errors import UserError
from vapo.functional.advantages import anchor_mask
from vapo.functional.baselines import mean_of_others, measured_targets, prompt_noise_weights
from vapo.functional.masking import zero_outside
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.types import EvaluatedBatch, TrainingBatch


def with_value_offsets(batch: EvaluatedBatch, config: FitConfig) -> EvaluatedBatch:
    """Return the batch with values V in place of the outputs C of a critic of residuals.

        V_t = C_t + mean_{j != i} R_j - sum_{u < t} r_u        i: the response, j: of its group

    Such a critic (`critic.target: residual`) learns R_i less the mean of the other responses'. For
    other critics the batch is unchanged, because their outputs are values. r_u are the rewards of
    tokens that value targets add up, and R_j is their sum in a response. What is added to C_t
    depends on neither token t nor later ones, so V_t is a value like any other. With C = 0 and
    lambda 1 each token has the leave-one-out advantage.

    Source: NeMo-RL, in a branch of August 2026. Deviation: what a response has received already
    (the rewards of earlier turns, a KL penalty) is taken from its offset.
    """
    if config.critic.target != "residual" or batch.old_values is None:
        return batch
    rewards = rewards_on_tokens(batch, config.algorithm, critic_rewards(batch, config))
    others_mean = mean_of_others(rewards.sum(dim=1), group_size=batch.group_size)
    to_come = others_mean[:, None] - received_rewards(batch, rewards)
    offsets = zero_outside(to_come, batch.response_mask)
    member_values = batch.old_member_values
    return replace(
        batch,
        value_offsets=offsets,
        old_values=batch.old_values + offsets,
        old_member_values=None if member_values is None else member_values + offsets,
    )


def predicted_targets(batch: TrainingBatch) -> Float[Tensor, "B T"]:
    """Return what the critic's outputs should be: the value targets, less `value_offsets` if any.

    A critic of residuals has such offsets (`with_value_offsets`).
    """
    assert batch.value_targets is not None, "the estimator trains a critic"
    targets, offsets = batch.value_targets, batch.value_offsets
    return targets if offsets is None else targets - offsets


def value_weights(batch: EvaluatedBatch, config: FitConfig) -> Float[Tensor, " B"]:
    """Return the weights of the responses in the value loss. Every rank must call this.

    They are 1, or if `critic.weights` says so smaller for prompts whose rewards vary more. The
    weights depend on all rewards of the rollout batch, also those of truncated responses. They
    average 1 over the prompts that carry value loss, so that fillers of dynamic sampling change
    nothing.
    """
    if (
        config.critic.weights == "none" or batch.group_size == 1
    ):  # group size 1: only in a held-out page
        return torch.ones_like(batch.rewards)
    weights = prompt_noise_weights(
        critic_rewards(batch, config),
        group_size=batch.group_size,
        reward_range=reward_range(config),
        reduce=sum_over_ranks,
    )
    carries = batch.value_mask.any(dim=1).view(-1, batch.group_size).any(dim=1)
    of_prompts = weights.view(-1, batch.group_size)[:, 0].double()
    sums = [of_prompts[carries].sum(), carries.sum().double(), of_prompts.new_tensor(len(carries))]
    total, num_carrying, num_prompts = sum_over_ranks(torch.stack(sums)).tolist()
    if num_carrying in (0, num_prompts):
        return weights
    return weights * (num_carrying / total)


def reward_range(config: FitConfig) -> tuple[float, float]:
    """Return the least and the largest reward that a value target can contain."""
    rewards = config.rewards
    return rewards.incorrect - 1.0 * critic_is_punished(config), rewards.correct


def pretraining_columns(
    batch: EvaluatedBatch, returns: Float[Tensor, "B T"], settings: ValuePretraining
) -> dict[str, Tensor]:
    """Return by name the columns of the value loss in value pretraining.

    They are the targets, and where prefixes were continued also the number of returns in each
    target (`value_draws`) and the tokens that carry the loss. The minibatch's denominator counts
    the returns, so their numbers are not scaled to a mean of 1.
    """
    if batch.measured_values is None or batch.measured_draws is None:
        return {"value_targets": returns}
    targets, draws = measured_targets(returns, batch.measured_values, batch.measured_draws)
    columns = {"value_targets": targets}
    if settings.truth_weight != "none":
        columns["value_draws"] = draws
    if settings.truth_weight == "only":
        columns["value_mask"] = batch.value_mask & (batch.measured_draws > 0)
    return columns


def anchor_token_mask(batch: EvaluatedBatch, critic: CriticConfig) -> Bool[Tensor, "B T"]:
    """Return the mask of the tokens that carry value loss in the policy phase.

    With `critic.anchors` (SP3O) only a few tokens of each response do, at fractions of its length.
    """
    if not critic.anchors:
        return batch.value_mask
    is_anchor = anchor_mask(batch.response_mask, fractions=critic.anchors)
    if critic.late_anchor is not None:
        late = anchor_mask(batch.response_mask, fractions=[critic.late_anchor])
        is_anchor |= late & (batch.response_lengths >= critic.late_anchor_tokens)[:, None]
    return is_anchor & batch.value_mask


def check_value_targets(batch: TrainingBatch, critic: CriticConfig) -> None:
    """Check before the update that the value targets are within the head's range, if it has one.

    The config cannot be checked for this, because verifiers may give any rewards. Every rank must
    call this.

    Raises: UserError: on all ranks, naming the targets' range and the head's.
    """
    ends = value_range(critic)
    if ends is None or batch.value_targets is None:
        return
    targets = predicted_targets(batch)
    counted_targets = targets[batch.value_mask & torch.isfinite(targets)]
    bounds = torch.tensor([-math.inf, -math.inf])
    if len(counted_targets):
        bounds = torch.stack([-counted_targets.min(), counted_targets.max()]).float().cpu()
    negative_low, high = max_over_ranks(bounds).tolist()
    low = -negative_low
    if low > high or ends.holds(low, high):
        return
    raise UserError(
        f"the value targets of this batch reach from {low:g} to {high:g}, and the "
        f"{critic.head.kind} head learns values from {ends.low:g} to {ends.high:g}: widen "
        "critic.head.low and critic.head.high (targets beyond them would count as the nearer end), "
        "or set critic.head.kind=scalar"
    )
