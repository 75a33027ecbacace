"""Rollouts and verdicts to tensors: the rollout batch, its rewards, and parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.config.schema import RewardConfig
from vapo.functional.masking import check_rewards_on_sampled, place_at_last_token
from vapo.rewards.overlong import soft_overlong_punishment
from vapo.types import FinishReason, Rollout, RolloutBatch, Turn, Verdict

Batch = TypeVar("Batch", bound=RolloutBatch)


def make_rollout_batch(
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
    *,
    group_size: int,
    rewards: RewardConfig,
    max_response_tokens: int,
    critic_truncated: Literal["as_policy", "train", "leave_out"] = "as_policy",
) -> RolloutBatch:
    """Pad responses into tensors and add the overlong shaping to the verifier's rewards.

    Args:
        critic_truncated: whether truncated responses carry value loss (`critic.truncated`).

    Raises:
        ValueError: a rollout without response tokens; not one verdict for each rollout.
    """
    if len(rollouts) != len(verdicts):
        raise ValueError(f"{len(rollouts)} rollouts but {len(verdicts)} verdicts")
    failed = torch.tensor([rollout.failure is not None for rollout in rollouts])
    lengths = torch.tensor([rollout.num_sampled for rollout in rollouts])
    if bool(((lengths == 0) & ~failed).any()):
        raise ValueError("a rollout has no response token: the sampler must return at least one")
    widths = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
    is_token = torch.arange(max(1, int(widths.max()))) < widths[:, None]
    response_ids = _on_tokens(is_token, [r.response_ids for r in rollouts], torch.long)
    logprobs = _on_tokens(is_token, [r.rollout_logprobs for r in rollouts], torch.float32)
    response_mask = is_token
    reward = torch.tensor([verdict.reward for verdict in verdicts], dtype=torch.float32)
    episodes: dict[str, Tensor] = {}
    if any(rollout.turns or rollout.failure for rollout in rollouts):
        response_mask = _on_tokens(is_token, [r.is_sampled for r in rollouts], torch.bool)
        as_turns = [_with_turns(r, verdict) for r, verdict in zip(rollouts, verdicts, strict=True)]
        episodes = turn_columns(as_turns, response_mask) | {"is_failed": failed}
        reward = episodes["turn_rewards"].sum(dim=1)  # the same, added up in float32 as everywhere
    unshaped_rewards = None
    if rewards.overlong.soft_punishment:
        unshaped_rewards = reward
        reward = reward + soft_overlong_punishment(
            lengths,
            max_response_tokens=max_response_tokens,
            cache_tokens=rewards.overlong.ramp_tokens(max_response_tokens),
        )
    finished = torch.tensor([r.finish_reason is FinishReason.STOP for r in rollouts])
    is_finished = response_mask & finished[:, None]
    loss_mask = is_finished if rewards.overlong.filter_truncated else response_mask
    value_masks = {"as_policy": None, "train": response_mask, "leave_out": is_finished}
    return RolloutBatch(
        rollouts=list(rollouts),
        verdicts=list(verdicts),
        response_ids=response_ids,
        response_mask=response_mask,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        rewards=reward,
        is_correct=torch.tensor([verdict.is_correct for verdict in verdicts]),
        group_size=group_size,
        max_response_tokens=max_response_tokens,
        unshaped_rewards=unshaped_rewards,
        value_mask=value_masks[critic_truncated],
        **episodes,
    )


def _on_tokens(
    is_token: Bool[Tensor, "B T"], rows: Sequence[Sequence[float]], dtype: torch.dtype
) -> Tensor:
    """One number for each token in its place, 0 elsewhere. [B, T]"""
    column = torch.zeros(is_token.shape, dtype=dtype)
    column[is_token] = torch.tensor([x for row in rows for x in row], dtype=dtype)
    return column


def _with_turns(rollout: Rollout, verdict: Verdict) -> Rollout:
    """A response beside episodes is one turn, which has the verifier's reward."""
    if rollout.turns or rollout.failure is not None:
        return rollout
    return replace(rollout, turns=(Turn(0, len(rollout.response_ids), verdict.reward),))


def turn_columns(
    rollouts: Sequence[Rollout], response_mask: Bool[Tensor, "B T"]
) -> dict[str, Tensor]:
    """The columns that only episodes have: turns' rewards and first sampled tokens.

    Raises: ValueError where a turn has a reward, and no sampled token to put it on.
    """
    rewards = torch.zeros(response_mask.shape)
    starts = torch.zeros_like(response_mask)
    for row, rollout in enumerate(rollouts):
        for turn, span in zip(rollout.turns, rollout.turn_spans, strict=True):
            if turn.num_sampled:
                starts[row, span.first], rewards[row, span.end - 1] = True, turn.reward
            elif turn.reward:
                raise ValueError(f"a turn of row {row} has a reward, and no token was sampled")
    return {"turn_rewards": rewards, "turn_starts": starts}


def placed_rewards(batch: RolloutBatch, rewards: Float[Tensor, " B"]) -> Float[Tensor, "B T"]:
    """Each response's reward on its last sampled token.

    An episode has each turn's reward on the turn's last sampled token, and the rest of its reward
    (the overlong punishment, a bootstrapped value) on the last of all.

    Raises: ValueError: a reward is on a token that the policy did not sample.
    """
    if batch.turn_rewards is None:
        return place_at_last_token(rewards, batch.response_mask)
    rest = rewards - batch.turn_rewards.sum(dim=1)
    placed = batch.turn_rewards + place_at_last_token(rest, batch.response_mask)
    check_rewards_on_sampled(placed, batch.response_mask)
    return placed


def without_failed(batch: Batch) -> Batch:
    """The groups that have lost no episode to its environment; all where none is whole."""
    if batch.is_failed is None:
        return batch
    size = batch.group_size
    lost = batch.is_failed.view(-1, size).any(dim=1).repeat_interleave(size)
    return batch if bool(lost.all()) else select_rows(batch, (~lost).nonzero().flatten().tolist())


def with_loss_on(batch: Batch, rows: Bool[Tensor, " B"]) -> Batch:
    """The batch in which the other rows carry no loss, of the policy or the critic."""
    value_mask = None if batch.value_mask is None else batch.value_mask & rows[:, None]
    return replace(batch, loss_mask=batch.loss_mask & rows[:, None], value_mask=value_mask)


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
