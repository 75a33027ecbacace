"""What a page shows of the truth: what prefixes are worth by continuations, beside the critic."""

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
    """The truth and V(s_t) - truth at each token, NaN where nothing is known of it.

    In a response that was continued from every step, a token has the truth of the last step's
    beginning at or before it. A prefix of its own says nothing of the tokens after it: only the
    token that was sampled there has its truth.
    """
    known = torch.full(batch.response_mask.shape, math.nan)
    for point in sorted(truth.points, key=lambda point: point.num_tokens):
        end = point.length if point.is_of_steps else point.num_tokens + 1
        known[point.row, point.num_tokens : end] = point.mean
    known = torch.where(batch.response_mask, known.to(batch.response_mask.device), math.nan)
    columns = {"truth": known}
    if batch.old_values is not None:
        columns["truth_error"] = batch.old_values - known
    return columns


def truth_data(truth: ValueTruth) -> dict[str, Any]:
    """What `page.js` shows of all measured prefixes: the verdict and two charts."""
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
    truth: ValueTruth, shown: Mapping[int, Int[Tensor, " n"]]
) -> dict[int, Profile]:
    """The measured prefixes of each row before one of its shown tokens, in order.

    Args:
        shown: of each row the places of its shown tokens in the response; of an episode those that
            the policy sampled.

    Columns: num_tokens, among the shown, mean of the returns, low and high of its 95 % interval,
    num_continuations, value: V there.
    """
    spread = fmean(point.noise * len(point.returns) for point in truth.points)
    found: dict[int, Profile] = {}
    for row, at in shown.items():
        number = {place: i for i, place in enumerate(at.tolist())}
        points = [p for p in truth.points if p.row == row and p.num_tokens in number]
        if not points:
            continue
        points.sort(key=lambda point: point.num_tokens)
        limits = [true_value_interval(p, truth.outcomes, spread=spread) for p in points]
        found[row] = {
            "num_tokens": [number[point.num_tokens] for point in points],
            "mean": [point.mean for point in points],
            "low": [low for low, _ in limits],
            "high": [high for _, high in limits],
            "num_continuations": [len(point.returns) for point in points],
            "value": finite_cells([point.value for point in points]),
        }
    return found


def truth_calibration(truth: ValueTruth) -> Profile:
    """Columns of a table with one row for each bin of the critic's values that has prefixes.

    Bins of equal width. The 95 % interval of `truth_mean` takes the prefixes of a prompt as one
    draw, and ends with the lowest and the highest return; None where fewer than four prompts are in
    the bin. Empty without a critic.
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
    used = table.num_tokens > 0
    earned = [x for point in truth.points for x in point.returns]
    lows, highs = limits_of_bins(table, min(earned), max(earned))
    return {
        "value_mean": table.mean_value[used].tolist(),
        "truth_mean": table.mean_return[used].tolist(),
        "truth_ci_low": lows,
        "truth_ci_high": highs,
        "num_prefixes": table.num_tokens[used].tolist(),
        "num_prompts": table.num_clusters[used].tolist(),
    }
