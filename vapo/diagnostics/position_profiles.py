"""Values, advantages and the reward's weight against token position (VC-PPO, figures 2 and 3).

Also the values' calibration: the returns achieved by responses, by the value predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.credit import achieved_returns, gae_lambdas, of_steps, value_places
from vapo.config import Hyperparameters
from vapo.evaluation import t_interval
from vapo.functional.metrics import (
    Calibration,
    calibration,
    explained_variance_by_position,
    mean_by_position,
)
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.types import TrainingBatch

_MAX_BINS = 64
_CALIBRATION_BINS = 12
Profile = dict[str, list[Any]]


def position_profile(
    batch: TrainingBatch, hyperparameters: Hyperparameters, *, max_response_tokens: int
) -> Profile:
    """Columns of a table with one row for each bin of token positions that has tokens.

    `position` is the bin's first; value, Monte-Carlo return, advantage and reward weight are
    means over the bin's tokens of all ranks. The advantage is before whitening, which would remove
    the mean over all positions, and with it the bias of a critic; explained variance is that
    of the bin's tokens, None where their returns are equal. Quantities that the phase or the
    system lacks are left out. With GAE over turns a token has its turn's value and return. Every
    rank must call this.
    """
    bin_tokens = math.ceil(max_response_tokens / _MAX_BINS)
    num_bins = math.ceil(max_response_tokens / bin_tokens)
    bins: dict[str, Any] = {"bin_tokens": bin_tokens, "num_bins": num_bins}
    mask, returns = batch.response_mask, returns_of_tokens(batch, hyperparameters)
    found: dict[str, Tensor] = {}
    if batch.old_values is not None:
        found["value"] = of_steps(batch.old_values, batch, hyperparameters)
        found["return"] = returns
        found["reward_weight"] = token_reward_weight(batch, hyperparameters)
    if batch.raw_advantages is not None:
        found["advantage"] = batch.raw_advantages
    if not found:
        return {}
    columns: Profile = {"position": [], "num_tokens": []}
    for name, x in found.items():
        one = mean_by_position(x, mask, **bins, reduce=sum_over_ranks)
        used = one.num_tokens > 0
        columns["position"] = (torch.arange(num_bins) * bin_tokens)[used].tolist()
        columns["num_tokens"] = one.num_tokens[used].tolist()
        columns[f"{name}_mean"] = one.mean[used].tolist()
        columns[f"{name}_std"] = one.std[used].tolist()
    if batch.old_values is not None:
        explained = explained_variance_by_position(
            found["value"], returns, mask, **bins, reduce=sum_over_ranks
        )
        columns["explained_variance"] = finite_cells(explained[used].tolist())
    return columns


def value_calibration(batch: TrainingBatch, hyperparameters: Hyperparameters) -> Profile:
    """Columns of a table with one row for each bin of predicted values that has tokens.

    Bins of equal width from the lowest to the highest value of all ranks. `num_correct_tokens`
    are those of responses that are correct. The 95 % interval of `return_mean` takes
    the responses to one prompt as one draw, and ends with the lowest and the highest return; None
    where fewer than four prompts have a token in the bin. Empty without a critic. Every rank must
    call this.
    """
    if batch.old_values is None:
        return {}
    values, mask = batch.old_values, value_places(batch, hyperparameters)
    returns = achieved_returns(batch, batch.value_rewards, hyperparameters)
    ends = max_over_ranks(torch.stack([-values[mask].min(), values[mask].max()]))
    edges = torch.linspace(-float(ends[0]), float(ends[1]), _CALIBRATION_BINS + 1).double()
    cut: dict[str, Any] = {"cluster_size": batch.group_size, "reduce": sum_over_ranks}
    found, correct = (
        calibration(values, returns, tokens, edges=edges, **cut)
        for tokens in (mask, mask & batch.is_correct[:, None])
    )
    used = found.num_tokens > 0
    ends = max_over_ranks(torch.stack([-returns[mask].min(), returns[mask].max()]))
    lows, highs = limits_of_bins(found, -float(ends[0]), float(ends[1]))
    return {
        "low": edges[:-1][used].tolist(),
        "high": edges[1:][used].tolist(),
        "num_tokens": found.num_tokens[used].tolist(),
        "num_correct_tokens": correct.num_tokens[used].tolist(),
        "num_prompts": found.num_clusters[used].tolist(),
        "value_mean": found.mean_value[used].tolist(),
        "return_mean": found.mean_return[used].tolist(),
        "return_ci_low": lows,
        "return_ci_high": highs,
    }


def limits_of_bins(table: Calibration, lowest: float, highest: float) -> list[list[float | None]]:
    """The low and the high limits of the bins' mean returns: 95 % intervals over the clusters, cut
    to the lowest and the highest return, which t does not know; None where there is no limit."""
    columns = (table.mean_return, table.standard_error, table.num_clusters)
    used = table.num_tokens > 0
    intervals = map(t_interval, *(column[used].tolist() for column in columns))
    return [
        [None if math.isinf(x) else min(max(x, lowest), highest) for x in limits]
        for limits in zip(*intervals, strict=True)
    ]


def finite_cells(column: Sequence[Any]) -> list[Any]:
    """JSON has no NaN and no infinity."""
    return [None if x is None or not math.isfinite(x) else x for x in column]


def returns_of_tokens(
    batch: TrainingBatch, hyperparameters: Hyperparameters
) -> Float[Tensor, "B T"]:
    """The Monte-Carlo return from each token on, as the critic's reward, whatever lambda is; with
    GAE over turns that from its turn on."""
    returns = achieved_returns(batch, batch.value_rewards, hyperparameters)
    return of_steps(returns, batch, hyperparameters)


def token_reward_weight(
    batch: TrainingBatch, hyperparameters: Hyperparameters
) -> Float[Tensor, "B T"]:
    """(gamma * lambda_policy)^(T - t): the share of the final reward that reaches token t directly.

    T is the response's last token, whose weight is 1. The rest comes through the values. With GAE
    over turns t counts turns.
    Source: VC-PPO 3.3.
    """
    places = value_places(batch, hyperparameters)
    steps_left = places.sum(dim=1, keepdim=True) - places.cumsum(dim=1)  # those behind the token
    lambdas = gae_lambdas(batch, hyperparameters)
    weights = (hyperparameters.gamma * lambdas) ** steps_left.clamp(min=0)
    return torch.where(batch.response_mask, weights, 0.0).float()
