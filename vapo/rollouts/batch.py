"""Rollouts and verdicts to tensors: the rollout batch, its rewards, and parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vapo.config.schema import RewardConfig
from vapo.rewards.overlong import soft_overlong_punishment
from vapo.types import FinishReason, Rollout, RolloutBatch, Verdict

Batch = TypeVar("Batch", bound=RolloutBatch)


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
        ValueError: a rollout without response tokens; not one verdict for each rollout.
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


def select_rows(batch: Batch, rows: Sequence[int], *, width: int | None = None) -> Batch:
    """Select rows of a batch in the order given, cut to the first `width` response tokens."""
    chosen: dict[str, Any] = {}
    index = list(rows)
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, list):
            chosen[item.name] = [value[row] for row in index]
        elif isinstance(value, Tensor):
            chosen[item.name] = value[index, :width] if value.dim() == 2 else value[index]
    return replace(batch, **chosen)


def moved_to(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch to a device."""
    columns = {item.name: getattr(batch, item.name) for item in fields(batch)}
    moved: dict[str, Any] = {
        name: value.to(device) for name, value in columns.items() if isinstance(value, Tensor)
    }
    return replace(batch, **moved)


def float_columns(batch: RolloutBatch) -> dict[str, Tensor]:
    """The batch's numbers by name: of each response [B], or of each of its tokens [B, T]."""
    columns = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return {
        name: value
        for name, value in columns.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
