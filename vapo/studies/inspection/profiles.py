"""Tables of the sampled tokens for the page's charts: by position, by value, by response length."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vapo.diagnostics.position_profiles import Profile, finite, limits_of_bins
from vapo.functional.metrics import calibration, explained_variance_by_position, mean_by_position
from vapo.studies.inspection.findings import Findings
from vapo.studies.inspection.group_sample import Tokens, response_length

_POSITION_BINS = 64
_VALUE_BINS = 12
_LENGTH_BINS = 8


def position_table(tokens: Tokens) -> Profile:
    """Columns as those of a run's position profile (vapo/diagnostics/position_profiles.py)."""
    values, returns, mask = _by_row(tokens)
    bin_tokens = math.ceil(mask.shape[1] / _POSITION_BINS)
    num_bins = math.ceil(mask.shape[1] / bin_tokens)
    columns: Profile = {}
    for name, x in (("value", values), ("return", returns)):
        one = mean_by_position(x, mask, bin_tokens=bin_tokens, num_bins=num_bins)
        used = one.num_tokens > 0
        columns["position"] = (torch.arange(num_bins) * bin_tokens)[used].tolist()
        columns["num_tokens"] = one.num_tokens[used].tolist()
        columns[f"{name}_mean"] = one.mean[used].tolist()
        columns[f"{name}_std"] = one.std[used].tolist()
    explained = explained_variance_by_position(
        values, returns, mask, bin_tokens=bin_tokens, num_bins=num_bins
    )
    columns["explained_variance"] = finite(explained[used].tolist())
    return columns


def calibration_table(tokens: Tokens, is_right: np.ndarray) -> Profile:
    """Columns as those of a run's calibration; the tokens of a group are one draw.

    Args:
        is_right: of each response, whether its reward is above the mean.
    """
    order = np.argsort(tokens.group, kind="stable")
    sizes = np.bincount(tokens.group, minlength=tokens.num_groups)

    def by_group(x: np.ndarray) -> Tensor:
        rows = torch.from_numpy(x[order]).split(sizes.tolist())
        return pad_sequence([row for row in rows if len(row)], batch_first=True)

    values, returns = by_group(tokens.values), by_group(tokens.returns)
    mask = by_group(np.ones(len(order), dtype=bool))
    right = by_group(is_right[tokens.row])
    low, high = float(tokens.values.min()), float(tokens.values.max())
    edges = torch.linspace(low, high, _VALUE_BINS + 1, dtype=torch.float64)
    table = calibration(values, returns, mask, edges=edges)
    correct = calibration(values, returns, mask & right, edges=edges)
    used = table.num_tokens > 0
    lows, highs = limits_of_bins(table, float(tokens.returns.min()), float(tokens.returns.max()))
    return {
        "low": edges[:-1][used].tolist(),
        "high": edges[1:][used].tolist(),
        "num_tokens": table.num_tokens[used].tolist(),
        "num_correct_tokens": correct.num_tokens[used].tolist(),
        "num_prompts": table.num_clusters[used].tolist(),
        "value_mean": table.mean_value[used].tolist(),
        "return_mean": table.mean_return[used].tolist(),
        "return_ci_low": lows,
        "return_ci_high": highs,
    }


def length_table(findings: Findings, tokens: Tokens | None) -> Profile:
    """Bins of response lengths with about as many responses each: mean reward, and mean value."""
    lengths, rewards, values = [], [], []
    means = None
    if tokens is not None:
        num = np.maximum(np.bincount(tokens.row, minlength=len(tokens.rewards)), 1)
        sums = np.bincount(tokens.row, weights=tokens.values, minlength=len(tokens.rewards))
        means = iter((sums / num).tolist())
    for response in findings.responses:
        value = math.nan if means is None or response.values is None else next(means)
        if (length := response_length(response)) is not None:
            lengths.append(length)
            rewards.append(response.reward)
            values.append(value)
    if len(set(lengths)) < 2:
        return {}
    x, y, z = (np.array(column, dtype=float) for column in (lengths, rewards, values))
    edges = np.unique(np.quantile(x, np.linspace(0, 1, _LENGTH_BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, x, side="left")
    used = [bins == number for number in np.unique(bins)]
    return {
        "length": [float(x[rows].mean()) for rows in used],
        "num": [int(rows.sum()) for rows in used],
        "reward_mean": [float(y[rows].mean()) for rows in used],
        "value_mean": finite([float(z[rows].mean()) for rows in used]),
    }


def _by_row(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Values, returns and the mask, a row a response. [B, T]"""
    sizes = np.bincount(tokens.row, minlength=len(tokens.rewards)).tolist()
    padded = (
        pad_sequence(list(torch.from_numpy(x).split(sizes)), batch_first=True)
        for x in (tokens.values, tokens.returns, np.ones(len(tokens.row), dtype=bool))
    )
    values, returns, mask = padded
    return values, returns, mask
