"""Values, advantages and the reward's weight against token position (VC-PPO, figures 2 and 3)."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages import policy_lambda
from vapo.config import Hyperparameters
from vapo.distributed import sum_over_ranks
from vapo.functional.metrics import PositionProfile, mean_by_position
from vapo.types import RolloutBatch

_MAX_BINS = 64
Profile = dict[str, list[Any]]


def position_profile(
    batch: RolloutBatch, hyperparameters: Hyperparameters, *, max_response_tokens: int
) -> Profile:
    """Columns of a table with one row for each bin of token positions that has tokens.

    `position` is the bin's first; value, advantage (before whitening) and reward weight are
    means over the bin's tokens of all ranks. Quantities that the phase or the system lacks are
    left out. Every rank must call this.
    """
    bin_tokens = math.ceil(max_response_tokens / _MAX_BINS)
    num_bins = math.ceil(max_response_tokens / bin_tokens)

    def profile(x: Float[Tensor, "B T"]) -> PositionProfile:
        return mean_by_position(
            x,
            batch.response_mask,
            bin_tokens=bin_tokens,
            num_bins=num_bins,
            reduce=sum_over_ranks,
        )

    found: dict[str, Tensor] = {}
    if batch.old_values is not None:
        found["value"] = batch.old_values
        found["reward_weight"] = reward_weight(batch, hyperparameters)
    if batch.raw_advantages is not None:
        found["advantage"] = batch.raw_advantages
    if not found:
        return {}
    profiles = {name: profile(x) for name, x in found.items()}
    num_tokens = next(iter(profiles.values())).num_tokens
    used = num_tokens > 0
    columns: Profile = {
        "position": (torch.arange(num_bins) * bin_tokens)[used].tolist(),
        "num_tokens": num_tokens[used].tolist(),
    }
    for name, one in profiles.items():
        columns[f"{name}_mean"] = one.mean[used].tolist()
        columns[f"{name}_std"] = one.std[used].tolist()
    return columns


def reward_weight(batch: RolloutBatch, hyperparameters: Hyperparameters) -> Float[Tensor, "B T"]:
    """(gamma * lambda_policy)^(T - t): how much of the final reward reaches token t at once.

    T is the response's last token, whose weight is 1. What is missing comes through the values.
    Source: VC-PPO 3.3.
    """
    steps_left = batch.response_mask.flip(1).cumsum(1).flip(1) - 1
    lambdas = torch.as_tensor(policy_lambda(batch, hyperparameters), dtype=torch.float32)
    decay = hyperparameters.gamma * lambdas
    return torch.where(batch.response_mask, decay ** steps_left.clamp(min=0), 0.0)
