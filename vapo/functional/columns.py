"""The columns of a batch: put rewards on tokens, list numbers, select rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.functional.masking import check_rewards_on_sampled, place_at_last_token
from vapo.types import RolloutBatch

Batch = TypeVar("Batch", bound=RolloutBatch)

_NOT_READ = ("turn_rewards", "unshaped_rewards")
"""Columns that are not trained on, because `rewards` contains them."""


def placed_rewards(batch: RolloutBatch, rewards: Float[Tensor, " B"]) -> Float[Tensor, "B T"]:
    """Put the rewards of an episode's turns on the turns' last sampled tokens.

    What `rewards` has beyond the sum of the turns' rewards goes to the row's last sampled token. It
    is the overlong punishment, or a bootstrapped value. A row of a single turn gets its reward
    unchanged, because subtracting and adding could round it.

    Raises: ValueError: a reward is on a token that the policy did not sample.
    """
    rest = rewards - batch.turn_rewards.sum(dim=1)
    token_rewards = batch.turn_rewards + place_at_last_token(rest, batch.response_mask)
    is_one_turn = batch.turn_starts.sum(dim=1, keepdim=True) < 2
    token_rewards = torch.where(
        is_one_turn, place_at_last_token(rewards, batch.response_mask), token_rewards
    )
    check_rewards_on_sampled(token_rewards, batch.response_mask)
    return token_rewards


def float_columns(batch: RolloutBatch) -> dict[str, Tensor]:
    """Return the float columns of a batch by name: [B] for responses, [B, T] for tokens."""
    return {
        name: value
        for name, value in vars(batch).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def bad_inputs(
    batch: RolloutBatch, *, reads_entropies: bool = False
) -> dict[str, Bool[Tensor, " B"]]:
    """Return by name, for each float column that training reads, a mask of the rows in which the
    column has a number that is not finite.

    In a column for tokens, only the tokens in `response_mask` count. `turn_rewards` and
    `unshaped_rewards` have no mask, because `rewards` contains them.

    Args:
        reads_entropies: whether the advantage estimator reads `old_entropy`. If not, that column
            has no mask, because it then does not change the training.
    """
    bad_rows: dict[str, Tensor] = {}
    for name, value in float_columns(batch).items():
        if name in _NOT_READ or (name == "old_entropy" and not reads_entropies):
            continue
        is_bad = ~torch.isfinite(value)
        bad_rows[name] = (is_bad & batch.response_mask).any(dim=1) if value.dim() == 2 else is_bad
    return bad_rows


def select_rows(batch: Batch, rows: Sequence[int], *, width: int | None = None) -> Batch:
    """Select rows of a batch in the order of `rows`, cut to the first `width` response tokens."""
    columns: dict[str, Any] = {}
    index = list(rows)
    for name, value in vars(batch).items():
        if isinstance(value, list):
            columns[name] = [value[row] for row in index]
        elif isinstance(value, Tensor):
            columns[name] = value[index, :width] if value.dim() == 2 else value[index]
    return replace(batch, **columns)


def without_failed(batch: Batch) -> Batch:
    """Return the batch without the groups that have an episode whose environment failed.

    If every group has one, the batch is returned unchanged.
    """
    size = batch.group_size
    in_failed_group = batch.is_lost.view(-1, size).any(dim=1).repeat_interleave(size)
    return (
        batch
        if bool(in_failed_group.all())
        else select_rows(batch, (~in_failed_group).nonzero().flatten().tolist())
    )


def with_loss_on(batch: Batch, rows: Bool[Tensor, " B"]) -> Batch:
    """Return the batch with loss on these rows alone; all other rows become fillers."""
    masks = {name: getattr(batch, name) & rows[:, None] for name in ("loss_mask", "value_mask")}
    return replace(batch, **masks, is_filler=~rows)


def moved_to(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with all of its tensors on a device."""
    tensors: dict[str, Any] = {
        name: on_device(value, device)
        for name, value in vars(batch).items()
        if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. A GPU reads it from pinned memory, and the host does not wait.

    A plain copy of pageable memory waits until the GPU has finished all earlier work. Then the
    host could not prepare the next micro-batch while the GPU computes. Pinning writes each element
    to its own place, so an expanded tensor is filled in first. Torch holds the pinned memory until
    the GPU has read it.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
