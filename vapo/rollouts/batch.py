"""Rollouts and verdicts to tensors: the rollout batch and its rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vapo.config.schema import RewardConfig
from vapo.rewards.overlong import soft_overlong_punishment
from vapo.types import FinishReason, Rollout, RolloutBatch, Verdict


def make_rollout_batch(
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
    *,
    group_size: int,
    rewards: RewardConfig,
    max_response_tokens: int,
) -> RolloutBatch:
    """Pad responses into tensors and add the overlong shaping to the verifier's rewards.

    Raises:
        ValueError: a rollout without response tokens, or as many verdicts as rollouts missing.
    """
    if len(rollouts) != len(verdicts):
        raise ValueError(f"{len(rollouts)} rollouts but {len(verdicts)} verdicts")
    lengths = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
    if int(lengths.min()) == 0:
        raise ValueError("a rollout has no response token: the sampler must return at least one")
    width = int(lengths.max())
    response_mask = torch.arange(width) < lengths[:, None]
    response_ids = torch.zeros(response_mask.shape, dtype=torch.long)
    response_ids[response_mask] = torch.tensor([i for r in rollouts for i in r.response_ids])
    rollout_logprobs = torch.zeros(response_mask.shape)
    rollout_logprobs[response_mask] = torch.tensor(
        [logprob for r in rollouts for logprob in r.rollout_logprobs]
    )
    reward = torch.tensor([verdict.reward for verdict in verdicts], dtype=torch.float32)
    if rewards.overlong.soft_punishment:
        reward = reward + soft_overlong_punishment(
            lengths,
            max_response_tokens=max_response_tokens,
            cache_tokens=rewards.overlong.ramp_tokens(max_response_tokens),
        )
    loss_mask = response_mask
    if rewards.overlong.filter_truncated:
        finished = torch.tensor([r.finish_reason is FinishReason.STOP for r in rollouts])
        loss_mask = response_mask & finished[:, None]
    return RolloutBatch(
        rollouts=list(rollouts),
        verdicts=list(verdicts),
        response_ids=response_ids,
        response_mask=response_mask,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        rewards=reward,
        is_correct=torch.tensor([verdict.is_correct for verdict in verdicts]),
        group_size=group_size,
        max_response_tokens=max_response_tokens,
    )
