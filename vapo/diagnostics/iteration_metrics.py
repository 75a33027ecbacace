"""Compute metrics of a rollout batch over all ranks. docs/metrics.md has their formulas and
units.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from vapo.advantages.credit import (
    achieved_returns,
    gae_lambdas,
    num_gae_steps,
    value_token_mask,
)
from vapo.advantages.mismatch_correction import mismatch_metrics
from vapo.advantages.oppo import success_metrics
from vapo.config import Hyperparameters
from vapo.functional.masking import first_column, last_column
from vapo.functional.metrics import (
    advantage_variance_ratio,
    explained_variance,
    first_token_reward_weight,
    gradient_noise_ratio,
    mean_of_other_responses,
    value_bias,
)
from vapo.system.distributed import gather_over_ranks, sum_over_ranks
from vapo.types import FinishReason, RolloutBatch, TrainingBatch


def iteration_metrics(batch: TrainingBatch, hyperparameters: Hyperparameters) -> dict[str, float]:
    """Return metric -> value of an iteration's rewards, lengths, values and advantages.

    It is called before the iteration's update. Every rank must call this.
    """
    metrics = response_metrics(batch)
    metrics |= episode_metrics(batch)
    metrics |= mismatch_metrics(batch)
    metrics |= value_metrics(batch, hyperparameters)
    if batch.answer_logprobs is not None:
        metrics |= success_metrics(batch)
    if batch.raw_advantages is not None:
        metrics["advantage/mean"], metrics["advantage/std"] = mean_and_std(
            batch.raw_advantages, batch.response_mask
        )
        if batch.value_targets is not None:
            lambdas = gather_over_ranks(gae_lambdas(batch, hyperparameters)[:, 0])
            metrics["advantage/lambda_policy_mean"] = float(lambdas.mean())
            metrics["advantage/lambda_policy_min"] = float(lambdas.min())
            metrics["advantage/lambda_policy_max"] = float(lambdas.max())
            metrics["advantage/first_token_reward_weight"] = reward_weight(batch, hyperparameters)
    return metrics


def reward_weight(batch: TrainingBatch, hyperparameters: Hyperparameters) -> float:
    """Return the weight of the final reward in the first token's advantage, a mean over
    responses.
    """
    decay = hyperparameters.gamma * gae_lambdas(batch, hyperparameters)
    weights = first_token_reward_weight(num_gae_steps(batch, hyperparameters), decay)
    return float(gather_over_ranks(weights).mean())


def response_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return metrics of rewards and lengths over all ranks' responses."""
    failed = [r.failure is not None and not r.is_lost for r in batch.rollouts]
    columns = torch.stack(
        [
            batch.rewards.double(),
            batch.is_correct.double(),
            batch.response_lengths.double(),
            batch.is_truncated.double(),
            torch.tensor(failed).double(),
            torch.tensor([len(r.prompt.prompt_ids) for r in batch.rollouts]).double(),
        ],
        dim=1,
    )
    reward, correct, lengths, truncation, failures, prompts = gather_over_ranks(columns).unbind(1)
    return {
        "rollout/reward_mean": float(reward.mean()),
        "rollout/accuracy": float(correct.mean()),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_min": float(lengths.min()),
        "rollout/response_length_p50": float(lengths.quantile(0.5)),
        "rollout/response_length_p90": float(lengths.quantile(0.9)),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncation_rate": float(truncation.mean()),
        "rollout/verifier_failures": float(failures.sum()),
        "rollout/num_response_tokens": float(lengths.sum()),
        "rollout/num_prompt_tokens": float(prompts.sum()),
    }


def episode_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return metrics of turns, observations and the ends of episodes; {} without an environment."""
    if not any(rollout.in_environment for rollout in batch.rollouts):
        return {}
    columns = torch.tensor(
        [
            [
                len(rollout.turns),
                len(rollout.response_ids) - rollout.num_sampled,
                sum(turn.reward for turn in rollout.turns),
                rollout.finish_reason is FinishReason.LENGTH,
                rollout.finish_reason is FinishReason.TURN_LENGTH,
                rollout.finish_reason is FinishReason.TURNS,
            ]
            for rollout in batch.rollouts
        ],
        dtype=torch.double,
    )
    turns, observed, rewards, *cut = gather_over_ranks(columns).unbind(1)
    by_tokens, by_turn_tokens, by_turns = cut
    return {
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_max": float(turns.max()),
        "rollout/turn_reward_mean": float(rewards.sum() / turns.sum().clamp(min=1)),
        "rollout/observation_tokens_mean": float(observed.mean()),
        "rollout/num_observation_tokens": float(observed.sum()),
        "rollout/truncated_by_tokens_rate": float(by_tokens.mean()),
        "rollout/truncated_by_turn_tokens_rate": float(by_turn_tokens.mean()),
        "rollout/truncated_by_turns_rate": float(by_turns.mean()),
    }


def value_metrics(batch: TrainingBatch, hyperparameters: Hyperparameters) -> dict[str, float]:
    """Return metrics that compare old values with Monte-Carlo returns; {} without a critic.

    The returns do not depend on the lambda of the value targets. Only tokens that have a value
    count: with GAE over turns the first of each turn.
    """
    if batch.old_values is None:
        return {}
    mask, values = value_token_mask(batch, hyperparameters), batch.old_values
    counted = mask & batch.counted_mask
    returns = achieved_returns(batch, batch.value_rewards, hyperparameters)
    bias = value_bias(values, returns, counted, reduce=sum_over_ranks)
    rows, first, last = torch.arange(len(batch)), first_column(mask), last_column(mask)
    ends = gather_over_ranks(torch.stack([values[rows, first], values[rows, last]], dim=1))
    mean, _ = mean_and_std(values, mask)
    spread = batch.value_spread
    metrics = {} if spread is None else {"critic/value_spread": mean_and_std(spread, mask)[0]}
    if batch.advantages is not None:
        columns = values, others_mean_reward(batch), returns
        ratio = advantage_variance_ratio(*columns, counted, reduce=sum_over_ranks)
        metrics["critic/advantage_variance_ratio"] = float(ratio)
        if hyperparameters.gae_over == "tokens":  # a turn's gradient is that of all its tokens
            noise = gradient_noise_ratio(
                *columns, batch.rollout_logprobs, counted, reduce=sum_over_ranks
            )
            metrics["critic/gradient_noise_ratio"] = float(noise)
    return metrics | {
        "critic/explained_variance": float(
            explained_variance(values, returns, mask, reduce=sum_over_ranks)
        ),
        "critic/value_bias": float(bias.mean),
        "critic/value_bias_share": float(bias.share),
        "critic/value_mean": mean,
        "critic/value_first_token_mean": float(ends[:, 0].mean()),
        "critic/value_last_token_mean": float(ends[:, 1].mean()),
    }


def others_mean_reward(batch: TrainingBatch) -> Tensor:
    """Return for each row the mean reward of the other responses to its prompt, over all ranks.

    The rewards are those of the critic. Only responses that are still in the batch count: a group
    may be incomplete. With one response for each prompt it is the mean of all other responses.
    """
    prompts = [rollout.prompt.prompt_id for rollout in batch.rollouts]
    is_next = [a != b or batch.group_size == 1 for a, b in pairwise(prompts)]
    groups = torch.tensor(list(accumulate(is_next, initial=0)))
    return mean_of_other_responses(
        batch.value_rewards.sum(dim=1), groups, counted=~batch.is_filler, reduce=sum_over_ranks
    )


def mean_and_std(values: Tensor, mask: Tensor) -> tuple[float, float]:
    """Return mean and population standard deviation over the tokens in `mask` on all ranks.

    Both are NaN if there are no such tokens.
    """
    masked = torch.where(mask, values, 0.0).double()
    count, total = sum_over_ranks(torch.stack([mask.sum().double(), masked.sum()])).tolist()
    if count == 0:
        return math.nan, math.nan
    mean = total / count
    squares = torch.where(mask, (masked - mean) ** 2, 0.0).sum()
    return mean, (float(sum_over_ranks(squares)) / count) ** 0.5
