"""Make tables of sampled tokens for the page's charts: by position, by value, by response length.

A run's value pages have the same columns (vapo/diagnostics/position_profiles.py). That module
computes them from tensors; this one does not need torch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vapo.intervals import cut_t_intervals
from vapo.studies.inspection.figures import even_bins
from vapo.studies.inspection.findings import Findings
from vapo.studies.inspection.group_sample import Tokens, response_length

Profile = dict[str, list[Any]]  # the columns of a table
_POSITION_BINS = 64
_VALUE_BINS = 12
_LENGTH_BINS = 8


def position_table(tokens: Tokens) -> Profile:
    """Return means over the tokens in each bin of positions.

    The column `position` has the first position of each bin.
    """
    bin_tokens = math.ceil((int(tokens.position.max()) + 1) / _POSITION_BINS)
    bins = tokens.position // bin_tokens
    present = np.unique(bins)
    columns: Profile = {"position": (present * bin_tokens).tolist()}
    columns["num_tokens"] = np.bincount(bins)[present].tolist()
    error = tokens.returns - tokens.values
    spreads = {}
    for name, x in (("value", tokens.values), ("return", tokens.returns), ("error", error)):
        mean, variance = _means(x, bins)
        spreads[name] = variance[present]
        if name != "error":
            columns[f"{name}_mean"] = mean[present].tolist()
            columns[f"{name}_std"] = np.sqrt(variance[present]).tolist()
    columns["explained_variance"] = [
        None if r <= 1e-12 else 1 - e / r
        for r, e in zip(spreads["return"].tolist(), spreads["error"].tolist(), strict=True)
    ]
    return columns


def calibration_table(tokens: Tokens, is_right: np.ndarray) -> Profile:
    """Return the mean return of the tokens in each range of values, with a 95 % interval.

        se^2 = K / (K - 1) * sum_k (sum over tokens t of group k of (R_t - mean))^2 / n^2

    The tokens of a group count as one draw, and K is the number of groups with a token in the
    range. If K is below 4, the limits are None.

    Args:
        is_right: [responses] whether a response's reward is above the mean.
    """
    low, high = float(tokens.values.min()), float(tokens.values.max())
    edges = np.linspace(low, high, _VALUE_BINS + 1)
    bins = np.searchsorted(edges[1:-1], tokens.values, side="right")
    present = np.unique(bins)
    mean, _ = _means(tokens.returns, bins)
    count = np.bincount(bins, minlength=_VALUE_BINS)
    group_bin = tokens.group * _VALUE_BINS + bins
    shape = (tokens.num_groups, _VALUE_BINS)
    size = tokens.num_groups * _VALUE_BINS
    residuals = np.bincount(group_bin, weights=tokens.returns - mean[bins], minlength=size)
    hits = (np.bincount(group_bin, minlength=size).reshape(shape) > 0).sum(axis=0)
    squares = (residuals.reshape(shape) ** 2).sum(axis=0)
    k = hits[present]  # a single group has no interval, whatever its error
    errors = np.sqrt(k / np.maximum(k - 1, 1) * squares[present]) / count[present]
    lows, highs = cut_t_intervals(
        *(mean[present].tolist(), errors.tolist(), k.tolist()),
        lowest=float(tokens.returns.min()),
        highest=float(tokens.returns.max()),
    )
    num_right = np.bincount(bins, weights=is_right[tokens.row], minlength=_VALUE_BINS)
    return {
        "low": edges[:-1][present].tolist(),
        "high": edges[1:][present].tolist(),
        "num_tokens": count[present].tolist(),
        "num_correct_tokens": num_right[present].astype(int).tolist(),
        "num_prompts": hits[present].tolist(),
        "value_mean": _means(tokens.values, bins)[0][present].tolist(),
        "return_mean": mean[present].tolist(),
        "return_ci_low": lows,
        "return_ci_high": highs,
    }


def length_table(findings: Findings) -> Profile:
    """Return mean reward and mean value by response length; {} if all lengths are equal.

    The bins of lengths have about equally many responses.
    """
    if (tokens := findings.tokens) is not None:
        lengths, rewards = tokens.lengths.tolist(), tokens.rewards.tolist()
        values = np.full(len(lengths), math.nan)
        means, _ = _means(tokens.values, tokens.row)
        values[: len(means)] = means
    else:
        sizes = [(response_length(x), x.reward) for x in findings.responses]
        pairs = [(length, reward) for length, reward in sizes if length is not None]
        lengths, rewards = [x for x, _ in pairs], [y for _, y in pairs]
        values = np.full(len(lengths), math.nan)
    if len(set(lengths)) < 2:
        return {}
    x, y, z = (np.asarray(column, dtype=float) for column in (lengths, rewards, values))
    bins = even_bins(x, max_bins=_LENGTH_BINS)
    bin_masks = [bins == number for number in np.unique(bins)]
    value_means = [float(z[mask].mean()) for mask in bin_masks]
    return {
        "length": [float(x[mask].mean()) for mask in bin_masks],
        "num": [int(mask.sum()) for mask in bin_masks],
        "reward_mean": [float(y[mask].mean()) for mask in bin_masks],
        "value_mean": [None if math.isnan(mean) else mean for mean in value_means],
    }


def _means(x: np.ndarray, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the population variance of each bin's entries; NaN if a bin is empty."""
    with np.errstate(invalid="ignore"):
        count = np.bincount(bins)
        mean = np.bincount(bins, weights=x) / count
        return mean, np.bincount(bins, weights=(x - mean[bins]) ** 2) / count
