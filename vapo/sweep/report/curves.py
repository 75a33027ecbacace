"""Series for the figures: from a run's history to points, from runs of several seeds to bands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    "critic/explained_variance": "explained variance",
    "actor/clip_fraction_high": "upper clip fraction",
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
    steps = history.get("progress/policy_steps", {})
    if key == SCORE:
        values = sorted(history.get(key, {}).items())
        return {steps.get(step, 0.0): 100 * value for step, value in values}
    means = _iteration_means(history, key, pretraining=False)
    return {steps.get(before, 0.0): mean for _, before, mean in means}


def pretraining_points(history: History, key: str) -> Points:
    """A metric against iterations of value pretraining, from 1."""
    return {number: mean for number, _, mean in _iteration_means(history, key, pretraining=True)}


def _iteration_means(
    history: History, key: str, *, pretraining: bool
) -> Iterator[tuple[int, int, float]]:
    """Of each iteration of a phase: its number from 1, the step before it, the metric's mean."""
    phase, values = history.get("progress/phase", {}), history.get(key, {})
    before, number = 0, 0
    for step in sorted(phase):
        if bool(phase[step]) != pretraining:
            number += 1
            inside = [v for at, v in values.items() if before < at <= step and v == v]
            if inside:
                yield number, before, fmean(inside)
        before = step


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
    return _bands(runs, rows, lambda run: points(run.history, key))


def _bands(
    runs: Sequence[RunRecord], rows: Sequence[str], points: Callable[[RunRecord], Points]
) -> dict[str, Band]:
    """Row -> the band of its runs' points; a row without any is left out."""
    bands = {row: band(points(run) for run in runs if run.row == row) for row in rows}
    return {row: one for row, one in bands.items() if one is not None and one.x}


def position_columns(run: RunRecord, when: str) -> Mapping[str, Any]:
    """The position diagnostics at the `first` or the `last` iteration of the policy phase."""
    tables = [table for table in run.positions if table["phase"] == "policy_optimization"]
    if not tables:
        return {}
    columns: Mapping[str, Any] = sorted(tables, key=lambda table: int(table["iteration"]))[
        0 if when == "first" else -1
    ]["columns"]
    return columns


def position_bands(
    runs: Sequence[RunRecord], rows: Sequence[str], when: str, column: str
) -> dict[str, Band]:
    """`column` of the position diagnostics over the seeds of each row.

    A position is drawn as far as every seed has it and at least 5 % of the responses' tokens
    that the first position has.
    """

    def points(run: RunRecord) -> Points:
        columns = position_columns(run, when)
        if column not in columns:
            return {}
        names = ("position", column, "num_tokens")
        enough = 0.05 * columns["num_tokens"][0]
        parts = zip(*(columns[name] for name in names), strict=True)
        return {position: value for position, value, count in parts if count >= enough}

    return _bands(runs, rows, points)
