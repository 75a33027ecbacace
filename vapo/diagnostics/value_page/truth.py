"""What a page shows of measured true values, which come from continuations, beside the critic's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vapo.diagnostics.position_profiles import Profile, finite_cells, limits_of_bins
from vapo.diagnostics.value_truth.measure import ValueTruth
from vapo.diagnostics.value_truth.points import true_value_interval
from vapo.diagnostics.value_truth.verdict import verdict
from vapo.functional.metrics import calibration
from vapo.types import TrainingBatch

_CALIBRATION_BINS = 10


def truth_columns(truth: ValueTruth, batch: TrainingBatch) -> dict[str, Float[Tensor, "B T"]]:
    """Return two columns: each token's true value, and V(s_t) less it. NaN means not measured.

    In a response that was continued from every step, a token has the true value at the beginning of
    its step. A single prefix says nothing of later tokens, so only the token that follows it has
    its true value. Without a critic there is one column.
    """
    true_values = torch.full(batch.response_mask.shape, math.nan)
    for point in sorted(truth.points, key=lambda point: point.num_tokens):
        end = point.length if point.is_of_steps else point.num_tokens + 1
        true_values[point.row, point.num_tokens : end] = point.mean
    true_values = true_values.to(batch.response_mask.device)
    true_values = torch.where(batch.response_mask, true_values, math.nan)
    columns = {"truth": true_values}
    if batch.old_values is not None:
        columns["truth_error"] = batch.old_values - true_values
    return columns


def truth_data(truth: ValueTruth) -> dict[str, Any]:
    """Return what `page.js` shows of all measured prefixes: the verdict and two charts."""
    figures = truth.figures
    return {
        "verdict": [{"text": remark.text, "row": remark.row} for remark in verdict(figures)],
        "measured": (
            f"{figures.num_prefixes} prefixes of responses to {figures.num_prompts} prompts, "
            f"{figures.num_continuations} continuations from each"
        ),
        "calibration": truth_calibration(truth),
        "positions": {name: finite_cells(column) for name, column in figures.by_position.items()},
    }


def measured_prefixes(
    truth: ValueTruth, places_by_row: Mapping[int, Int[Tensor, " n"]]
) -> dict[int, Profile]:
    """Return row -> a table of its measured prefixes that end before a shown token, in order.

    The columns are num_tokens (how many shown tokens come before), mean (of the returns), low and
    high (of its 95 % interval), num_continuations and value (the critic's).

    Args:
        places_by_row: row -> the indices of its shown tokens in the response. In an episode they
            are tokens that the policy sampled.
    """
    spread = fmean(point.noise * len(point.returns) for point in truth.points)
    profiles: dict[int, Profile] = {}
    for row, places in places_by_row.items():
        number = {place: i for i, place in enumerate(places.tolist())}
        points = [p for p in truth.points if p.row == row and p.num_tokens in number]
        if not points:
            continue
        points.sort(key=lambda point: point.num_tokens)
        limits = [true_value_interval(p, truth.outcomes, spread=spread) for p in points]
        profiles[row] = {
            "num_tokens": [number[point.num_tokens] for point in points],
            "mean": [point.mean for point in points],
            "low": [low for low, _ in limits],
            "high": [high for _, high in limits],
            "num_continuations": [len(point.returns) for point in points],
            "value": finite_cells([point.value for point in points]),
        }
    return profiles


def truth_calibration(truth: ValueTruth) -> Profile:
    """Return the columns of a table with one row for each bin of the critic's values.

    The bins have equal widths. Empty ones are left out. The 95 % interval of `truth_mean` takes the
    prefixes of a prompt as one draw. Its limits are cut to the lowest and highest return, and None
    if fewer than four prompts are in the bin. Without a critic the table is empty.
    """
    by_prompt: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for point in truth.points:
        if point.value is not None and math.isfinite(point.value):
            by_prompt[point.prompt_id].append((point.value, point.mean, 1.0))
    if not by_prompt:
        return {}
    rows = pad_sequence([torch.tensor(rows) for rows in by_prompt.values()], batch_first=True)
    values, means, ones = rows.unbind(dim=2)
    mask = ones > 0
    low, high = float(values[mask].min()), float(values[mask].max())
    edges = torch.linspace(low, high, _CALIBRATION_BINS + 1).double()
    table = calibration(values, means, mask, edges=edges)
    has_prefixes = table.num_tokens > 0
    earned = [x for point in truth.points for x in point.returns]
    lows, highs = limits_of_bins(table, min(earned), max(earned))
    return {
        "value_mean": table.mean_value[has_prefixes].tolist(),
        "truth_mean": table.mean_return[has_prefixes].tolist(),
        "truth_ci_low": lows,
        "truth_ci_high": highs,
        "num_prefixes": table.num_tokens[has_prefixes].tolist(),
        "num_prompts": table.num_clusters[has_prefixes].tolist(),
    }
