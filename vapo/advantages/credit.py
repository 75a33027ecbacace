"""Rewards on tokens, what values and advantages belong to, and what the critic's loss is on."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.config import FitConfig, Hyperparameters
from vapo.config.components import ValuePretraining
from vapo.config.critic import CriticConfig
from vapo.config.critic_rules import critic_is_punished, value_range
from vapo.config.schema import AlgorithmConfig
from vapo.errors import UserError
from vapo.functional.advantages import anchor_mask, decoupled_gae, monte_carlo_returns
from vapo.functional.baselines import measured_targets, prompt_noise_weights
from vapo.functional.columns import placed_rewards
from vapo.functional.losses import kl_penalty
from vapo.functional.masking import last_column, zero_outside
from vapo.functional.turn_advantages import decoupled_turn_gae, on_whole_turns
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.types import EvaluatedBatch, RolloutBatch, TrainingBatch


def token_rewards(
    batch: EvaluatedBatch, algorithm: AlgorithmConfig, rewards: Float[Tensor, " B"] | None = None
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
    verifier judged the one turn, which was cut, as if it had ended.

    Source: EGAE (T-PPO, arXiv 2506.15050), where a response that is cut has no reward. Kept, the
    reward would count beside the value of the same future, and a target V(s_l) + r trained on
    would run away.
    """
    last = last_column(value_places(batch, hyperparameters))[:, None]
    after = hyperparameters.gamma * batch.values.gather(1, last)[:, 0]
    is_earned = torch.tensor([any(turn.has_ended for turn in r.turns) for r in batch.rollouts])
    after = after + torch.where(is_earned.to(after.device), batch.turn_rewards.sum(dim=1), 0.0)
    return torch.where(batch.is_truncated.to(after.device), after, rewards)


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


def value_weights(batch: EvaluatedBatch, config: FitConfig) -> Float[Tensor, " B"]:
    """The weights of the responses in the value loss. Every rank must call this.

    They are of the whole rollout batch's rewards, those of truncated responses included, and
    average 1 over the prompts that carry value loss: fillers of dynamic sampling change none.
    """
    if config.critic.weights == "none" or batch.group_size == 1:  # one: a held-out page's alone
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
    """The least and the largest reward that a value target has in it."""
    rewards = config.rewards
    return rewards.incorrect - 1.0 * critic_is_punished(config), rewards.correct


def taught(
    batch: EvaluatedBatch, returns: Float[Tensor, "B T"], settings: ValuePretraining
) -> dict[str, Tensor]:
    """The columns of the value loss in value pretraining: targets, and where prefixes were
    continued how many returns each has in it and which tokens carry the loss.

    The returns are not scaled to a mean of 1, as `value_weights` are: the minibatch's denominator
    counts them.
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


def anchored(batch: EvaluatedBatch, critic: CriticConfig) -> Bool[Tensor, "B T"]:
    """The value mask with the anchors alone (SP3O), in the policy phase."""
    if not critic.anchors:
        return batch.value_mask
    kept = anchor_mask(batch.response_mask, fractions=critic.anchors)
    if critic.late_anchor is not None:
        late = anchor_mask(batch.response_mask, fractions=[critic.late_anchor])
        kept |= late & (batch.response_lengths >= critic.late_anchor_tokens)[:, None]
    return kept & batch.value_mask


def check_value_targets(batch: TrainingBatch, critic: CriticConfig) -> None:
    """Compare before the update; nothing to do for a head without a range. All ranks call it.

    Verifiers that give rewards of their own are known only now.

    Raises: UserError on all ranks, naming the targets' range and the head's.
    """
    ends = value_range(critic)
    if ends is None or batch.value_targets is None:
        return
    targets = batch.value_targets
    counted = targets[batch.value_mask & torch.isfinite(targets)]
    found = torch.tensor([-math.inf, -math.inf])
    if len(counted):
        found = torch.stack([-counted.min(), counted.max()]).float().cpu()
    negative_low, high = max_over_ranks(found).tolist()
    low = -negative_low
    if low > high or ends.holds(low, high):
        return
    raise UserError(
        f"the value targets of this batch reach from {low:g} to {high:g}, and the "
        f"{critic.head.kind} head learns values from {ends.low:g} to {ends.high:g}: widen "
        "critic.head.low and critic.head.high (targets beyond them would count as the nearer end), "
        "or set critic.head.kind=scalar"
    )
