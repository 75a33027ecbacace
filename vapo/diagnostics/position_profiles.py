"""Profiles of values, advantages and reward weights by token position (VC-PPO, figures 2 and 3).

There is also the values' calibration: the returns that responses achieved, by predicted value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.credit import (
    achieved_returns,
    gae_lambdas,
    spread_over_steps,
    value_token_mask,
)
from vapo.config import Hyperparameters
from vapo.functional.metrics import (
    Calibration,
    calibration,
    explained_variance_by_position,
    mean_by_position,
)
from vapo.intervals import cut_t_intervals
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.types import TrainingBatch

_MAX_BINS = 64
_CALIBRATION_BINS = 12
Profile = dict[str, list[Any]]  # the columns of a table


def position_profile(
    batch: TrainingBatch, hyperparameters: Hyperparameters, *, max_response_tokens: int
) -> Profile:
    """Return the columns of a table with one row for each bin of token positions that has tokens.

    `position` is the first position of the bin. Value, Monte-Carlo return, advantage and reward
    weight are means over the bin's tokens of all ranks. The advantage is before whitening, which
    would remove the mean over all positions and with it the bias of a critic. The explained
    variance is computed over the bin's tokens, and None if their returns are equal. Columns that
    the phase or the config lacks are left out. With GAE over turns a token has its turn's value and
    return. Every rank must call this.
    """
    bin_tokens = math.ceil(max_response_tokens / _MAX_BINS)
    num_bins = math.ceil(max_response_tokens / bin_tokens)
    bins: dict[str, Any] = {"bin_tokens": bin_tokens, "num_bins": num_bins}
    mask, returns = batch.response_mask, returns_of_tokens(batch, hyperparameters)
    quantities: dict[str, Tensor] = {}
    if batch.old_values is not None:
        quantities["value"] = spread_over_steps(batch.old_values, batch, hyperparameters)
        quantities["return"] = returns
        quantities["reward_weight"] = token_reward_weight(batch, hyperparameters)
    if batch.raw_advantages is not None:
        quantities["advantage"] = batch.raw_advantages
    if not quantities:
        return {}
    columns: Profile = {"position": [], "num_tokens": []}
    for name, x in quantities.items():
        statistics = mean_by_position(x, mask, **bins, reduce=sum_over_ranks)
        has_tokens = statistics.num_tokens > 0
        columns["position"] = (torch.arange(num_bins) * bin_tokens)[has_tokens].tolist()
        columns["num_tokens"] = statistics.num_tokens[has_tokens].tolist()
        columns[f"{name}_mean"] = statistics.mean[has_tokens].tolist()
        columns[f"{name}_std"] = statistics.std[has_tokens].tolist()
    if batch.old_values is not None:
        explained = explained_variance_by_position(
            quantities["value"], returns, mask, **bins, reduce=sum_over_ranks
        )
        columns["explained_variance"] = finite_cells(explained[has_tokens].tolist())
    return columns


def value_calibration(batch: TrainingBatch, hyperparameters: Hyperparameters) -> Profile:
    """Return the columns of a table with one row for each bin of predicted values that has tokens.

    The bins have equal widths, from the lowest to the highest value of all ranks.
    `num_correct_tokens` counts the tokens of correct responses. The 95 % interval of `return_mean`
    takes the responses to one prompt as one draw. Its limits are cut to the lowest and highest
    return, and None if fewer than four prompts have a token in the bin. Without a critic the table
    is empty. Every rank must call this.
    """
    if batch.old_values is None:
        return {}
    values, mask = batch.old_values, value_token_mask(batch, hyperparameters)
    returns = achieved_returns(batch, batch.value_rewards, hyperparameters)
    ends = max_over_ranks(torch.stack([-values[mask].min(), values[mask].max()]))
    edges = torch.linspace(-float(ends[0]), float(ends[1]), _CALIBRATION_BINS + 1).double()
    options: dict[str, Any] = {"cluster_size": batch.group_size, "reduce": sum_over_ranks}
    table, correct = (
        calibration(values, returns, tokens, edges=edges, **options)
        for tokens in (mask, mask & batch.is_correct[:, None])
    )
    has_tokens = table.num_tokens > 0
    ends = max_over_ranks(torch.stack([-returns[mask].min(), returns[mask].max()]))
    lows, highs = limits_of_bins(table, -float(ends[0]), float(ends[1]))
    return {
        "low": edges[:-1][has_tokens].tolist(),
        "high": edges[1:][has_tokens].tolist(),
        "num_tokens": table.num_tokens[has_tokens].tolist(),
        "num_correct_tokens": correct.num_tokens[has_tokens].tolist(),
        "num_prompts": table.num_clusters[has_tokens].tolist(),
        "value_mean": table.mean_value[has_tokens].tolist(),
        "return_mean": table.mean_return[has_tokens].tolist(),
        "return_ci_low": lows,
        "return_ci_high": highs,
    }


def limits_of_bins(table: Calibration, lowest: float, highest: float) -> list[list[float | None]]:
    """Return two lists: the low and the high limit of the mean return of each bin that has tokens.

    They are 95 % intervals over the clusters, cut to the lowest and highest return.
    """
    columns = (table.mean_return, table.standard_error, table.num_clusters)
    has_tokens = table.num_tokens > 0
    numbers = (column[has_tokens].tolist() for column in columns)
    return cut_t_intervals(*numbers, lowest=lowest, highest=highest)


def finite_cells(column: Sequence[Any]) -> list[Any]:
    """Return the column with None for NaN and the infinities, which JSON lacks."""
    return [None if x is None or not math.isfinite(x) else x for x in column]


def returns_of_tokens(
    batch: TrainingBatch, hyperparameters: Hyperparameters
) -> Float[Tensor, "B T"]:
    """Return the Monte-Carlo return from each token on, with the critic's rewards.

    It does not depend on lambda. With GAE over turns it is the return from the token's turn on.
    """
    returns = achieved_returns(batch, batch.value_rewards, hyperparameters)
    return spread_over_steps(returns, batch, hyperparameters)


def token_reward_weight(
    batch: TrainingBatch, hyperparameters: Hyperparameters
) -> Float[Tensor, "B T"]:
    """Return (gamma * lambda_policy)^(T - t), the direct weight of the final reward at token t.

    T is the response's last token, whose weight is 1. The other part of the reward reaches token t
    through the values. With GAE over turns t counts turns. Source: VC-PPO 3.3.
    """
    places = value_token_mask(batch, hyperparameters)
    steps_left = places.sum(dim=1, keepdim=True) - places.cumsum(dim=1)  # steps after the token's
    lambdas = gae_lambdas(batch, hyperparameters)
    weights = (hyperparameters.gamma * lambdas) ** steps_left.clamp(min=0)
    return torch.where(batch.response_mask, weights, 0.0).float()
