"""Tables of the sampled tokens for the page's charts: by position, by value, by response length.

Their columns are those of a run's value pages (vapo/diagnostics/position_profiles.py), which are
made of tensors; here nothing needs torch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import stdtrit

from vapo.diagnostics.value_truth.figure import MIN_PROMPTS
from vapo.studies.inspection.figures import even_bins
from vapo.studies.inspection.findings import Findings
from vapo.studies.inspection.group_sample import Tokens, response_length

Profile = dict[str, list[Any]]
_POSITION_BINS = 64
_VALUE_BINS = 12
_LENGTH_BINS = 8


def position_table(tokens: Tokens) -> Profile:
    """Means over the tokens of a bin of positions; `position` is the bin's first."""
    bin_tokens = math.ceil((int(tokens.position.max()) + 1) / _POSITION_BINS)
    bins = tokens.position // bin_tokens
    used = np.unique(bins)
    columns: Profile = {"position": (used * bin_tokens).tolist()}
    columns["num_tokens"] = np.bincount(bins)[used].tolist()
    error = tokens.returns - tokens.values
    spreads = {}
    for name, x in (("value", tokens.values), ("return", tokens.returns), ("error", error)):
        mean, variance = _means(x, bins)
        spreads[name] = variance[used]
        if name != "error":
            columns[f"{name}_mean"] = mean[used].tolist()
            columns[f"{name}_std"] = np.sqrt(variance[used]).tolist()
    columns["explained_variance"] = [
        None if r <= 1e-12 else 1 - e / r
        for r, e in zip(spreads["return"].tolist(), spreads["error"].tolist(), strict=True)
    ]
    return columns


def calibration_table(tokens: Tokens, is_right: np.ndarray) -> Profile:
    """Mean return of the tokens of a range of values, with a 95 % interval.

        se^2 = K / (K - 1) * sum_k (sum over tokens t of group k of (R_t - mean))^2 / n^2

    The tokens of a group are one draw, K the groups with a token in the range. No limit where
    there are fewer than four.

    Args:
        is_right: of each response, whether its reward is above the mean.
    """
    low, high = float(tokens.values.min()), float(tokens.values.max())
    edges = np.linspace(low, high, _VALUE_BINS + 1)
    bins = np.searchsorted(edges[1:-1], tokens.values, side="right")
    used = np.unique(bins)
    mean, _ = _means(tokens.returns, bins)
    count = np.bincount(bins, minlength=_VALUE_BINS)
    cell = tokens.group * _VALUE_BINS + bins
    shape = (tokens.num_groups, _VALUE_BINS)
    size = tokens.num_groups * _VALUE_BINS
    residuals = np.bincount(cell, weights=tokens.returns - mean[bins], minlength=size)
    hits = (np.bincount(cell, minlength=size).reshape(shape) > 0).sum(axis=0)
    squares = (residuals.reshape(shape) ** 2).sum(axis=0)
    ends = float(tokens.returns.min()), float(tokens.returns.max())
    lows: list[float | None] = []
    highs: list[float | None] = []
    for number in used:
        k = int(hits[number])
        if k < MIN_PROMPTS:
            lows.append(None)
            highs.append(None)
            continue
        error = math.sqrt(k / (k - 1) * squares[number]) / count[number]
        half = float(stdtrit(k - 1, 0.975)) * error
        lows.append(max(float(mean[number]) - half, ends[0]))
        highs.append(min(float(mean[number]) + half, ends[1]))
    right = np.bincount(bins, weights=is_right[tokens.row], minlength=_VALUE_BINS)
    return {
        "low": edges[:-1][used].tolist(),
        "high": edges[1:][used].tolist(),
        "num_tokens": count[used].tolist(),
        "num_correct_tokens": right[used].astype(int).tolist(),
        "num_prompts": hits[used].tolist(),
        "value_mean": _means(tokens.values, bins)[0][used].tolist(),
        "return_mean": mean[used].tolist(),
        "return_ci_low": lows,
        "return_ci_high": highs,
    }


def length_table(findings: Findings) -> Profile:
    """Bins of response lengths with about as many responses each: mean reward, and mean value."""
    if (tokens := findings.tokens) is not None:
        lengths, rewards = tokens.lengths.tolist(), tokens.rewards.tolist()
        values = np.full(len(lengths), math.nan)
        means, _ = _means(tokens.values, tokens.row)
        values[: len(means)] = means
    else:
        known = [(response_length(one), one.reward) for one in findings.responses]
        pairs = [(length, reward) for length, reward in known if length is not None]
        lengths, rewards = [x for x, _ in pairs], [y for _, y in pairs]
        values = np.full(len(lengths), math.nan)
    if len(set(lengths)) < 2:
        return {}
    x, y, z = (np.asarray(column, dtype=float) for column in (lengths, rewards, values))
    bins = even_bins(x, most=_LENGTH_BINS)
    used = [bins == number for number in np.unique(bins)]
    return {
        "length": [float(x[rows].mean()) for rows in used],
        "num": [int(rows.sum()) for rows in used],
        "reward_mean": [float(y[rows].mean()) for rows in used],
        "value_mean": [None if math.isnan(m) else m for m in (float(z[r].mean()) for r in used)],
    }


def _means(x: np.ndarray, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population variance of each bin; NaN without an entry."""
    with np.errstate(invalid="ignore"):
        count = np.bincount(bins)
        mean = np.bincount(bins, weights=x) / count
        return mean, np.bincount(bins, weights=(x - mean[bins]) ** 2) / count
