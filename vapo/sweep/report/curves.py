"""Series for the figures: from a run's history to points, from runs of several seeds to bands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vapo.sweep.report.recorded import SCORE
from vapo.sweep.report.runs import History, RunRecord

Points = Mapping[float, float]
PANELS = {
    SCORE: "score (avg@k), %",
    "rollout/response_length_mean": "response length, tokens",
    "rollout/reward_mean": "mean reward",
    "actor/entropy": "entropy, nats",
}


@dataclass(frozen=True)
class Band:
    """Mean over seeds, and the lowest and highest of them, at each x."""

    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    num_seeds: int


def policy_points(history: History, key: str) -> Points:
    """A metric against the policy's optimizer steps; value pretraining is left out.

    The score is in per cent.

    x is the number of steps of the policy that the value belongs to: an iteration's rollouts
    are those of the policy before its update, an evaluation's of the one after it. Entropy,
    logged at every step, is averaged over the iteration, at the iteration's beginning.
    """
    phase, steps = history.get("progress/phase", {}), history.get("progress/policy_steps", {})
    values = history.get(key, {})
    if key == SCORE:
        return {steps.get(step, 0.0): 100 * value for step, value in sorted(values.items())}
    points: dict[float, float] = {}
    previous = 0
    for step in sorted(phase):
        if phase[step]:
            inside = [v for at, v in values.items() if previous < at <= step and v == v]
            if inside:
                points[steps.get(previous, 0.0)] = fmean(inside)
        previous = step
    return points


def pretraining_points(history: History, key: str) -> Points:
    """A metric against iterations of value pretraining, from 1."""
    phase, values = history.get("progress/phase", {}), history.get(key, {})
    points: dict[float, float] = {}
    previous, number = 0, 0
    for step in sorted(phase):
        if not phase[step]:
            number += 1
            inside = [v for at, v in values.items() if previous < at <= step and v == v]
            if inside:
                points[number] = fmean(inside)
        previous = step
    return points


def band(series: Iterable[Points]) -> Band | None:
    """Over the seeds' points; an x that a seed lacks, because it is shorter, is left out."""
    found = [points for points in series if points]
    if not found:
        return None
    shared = sorted(set.intersection(*(set(points) for points in found)))
    columns = [[points[x] for points in found] for x in shared]
    return Band(
        shared,
        [fmean(column) for column in columns],
        [min(column) for column in columns],
        [max(column) for column in columns],
        len(found),
    )


def row_bands(
    runs: Sequence[RunRecord], rows: Sequence[str], key: str, *, pretraining: bool = False
) -> dict[str, Band]:
    points = pretraining_points if pretraining else policy_points
    bands = {row: band(points(run.history, key) for run in runs if run.row == row) for row in rows}
    return {row: one for row, one in bands.items() if one is not None and one.x}


def position_tables(run: RunRecord) -> dict[str, Mapping[str, Any]]:
    """The position diagnostics at the first and at the last iteration of the policy phase."""
    tables = [table for table in run.positions if table["phase"] == "policy_optimization"]
    if not tables:
        return {}
    ordered = sorted(tables, key=lambda table: int(table["iteration"]))
    return {"first": ordered[0], "last": ordered[-1]}


def position_bands(
    runs: Sequence[RunRecord], rows: Sequence[str], when: str, column: str
) -> dict[str, Band]:
    """`column` of the position diagnostics over the seeds of each row.

    A position is drawn as far as every seed has it and at least 5 % of the responses' tokens
    that the first position has.
    """
    bands = {}
    for row in rows:
        series = []
        for run in runs:
            columns = position_tables(run).get(when, {}).get("columns", {})
            if run.row == row and column in columns:
                counts = columns["num_tokens"]
                series.append(
                    {
                        position: value
                        for position, value, count in zip(
                            columns["position"], columns[column], counts, strict=True
                        )
                        if count >= 0.05 * counts[0]
                    }
                )
        one = band(series)
        if one is not None and one.x:
            bands[row] = one
    return bands
