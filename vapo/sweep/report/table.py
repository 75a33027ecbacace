"""The table: mean and interval over seeds, difference to the full system, the paper beside it.

Scores are in per cent. Intervals are 95 % t-intervals over seeds: they say how much training
runs differ, not how much a held-out set of another make would change the score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Literal

from scipy.stats import t as students_t

from vapo.sweep.report.runs import Collection

Interval = tuple[float, float]
Sign = Literal["agrees", "differs", "no effect", ""]
_ROUNDING = 1e-9  # per cent: what float arithmetic may leave of a difference of 0


@dataclass(frozen=True)
class Estimate:
    """A mean; `interval` None where one run, or none that can be paired, gives no spread."""

    mean: float
    interval: Interval | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out, by more than what float arithmetic may add."""
        if self.interval is None:
            return False
        return self.interval[0] > _ROUNDING or self.interval[1] < -_ROUNDING


@dataclass(frozen=True)
class RowResult:
    """One line. `sign`: that of the mean difference against the paper's; see `agreement`."""

    name: str
    num_runs: int
    score: Estimate | None
    difference: Estimate | None
    how: str
    paper_score: float | None
    paper_difference: float | None
    sign: Sign

    @property
    def is_shown(self) -> bool | None:
        """Whether the interval leaves zero out; None where there is no interval."""
        if self.difference is None or self.difference.interval is None:
            return None
        return self.difference.is_clear


def estimate(values: Sequence[float]) -> Estimate:
    """Mean +- t(0.975, n - 1) s / sqrt(n)."""
    if len(values) < 2:
        return Estimate(values[0])
    half = quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(fmean(values), (fmean(values) - half, fmean(values) + half))


def compare(scores: Mapping[int, float], full: Mapping[int, float]) -> tuple[Estimate, str]:
    """Row minus full system: paired where the seeds are common, else Welch's interval.

    Seeds fix prompts, evaluation and value pretraining, so pairing takes their part of the
    spread out.
    """
    common = sorted(scores.keys() & full.keys())
    if len(common) >= 2 or (common and min(len(scores), len(full)) < 2):
        return estimate([scores[seed] - full[seed] for seed in common]), "paired"
    mine, other = list(scores.values()), list(full.values())
    mean = fmean(mine) - fmean(other)
    if min(len(mine), len(other)) < 2:
        return Estimate(mean), "unpaired"
    parts = [variance(values) / len(values) for values in (mine, other)]
    if sum(parts) == 0:
        return Estimate(mean, (mean, mean)), "unpaired"
    degrees = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (mine, other), strict=True)
    )
    half = quantile(degrees) * math.sqrt(sum(parts))
    return Estimate(mean, (mean - half, mean + half)), "unpaired"


def quantile(degrees: float) -> float:
    return float(students_t.ppf(0.975, degrees))


def make_table(collection: Collection) -> list[RowResult]:
    """Every row of the collection, in its order, whether it has runs or not."""
    scores = {row.name: _scores(collection, row.name) for row in collection.rows}
    paper = {row.name: row.paper_score for row in collection.rows}
    full_name = collection.full_system
    full = scores.get(full_name or "", {})
    full_paper = paper.get(full_name or "")
    results = []
    for row in collection.rows:
        mine = scores[row.name]
        difference, how = None, ""
        if mine and full and row.name != full_name:
            difference, how = compare(mine, full)
        paper_difference = None
        if row.paper_score is not None and full_paper is not None and row.name != full_name:
            paper_difference = row.paper_score - full_paper
        results.append(
            RowResult(
                row.name,
                len(mine),
                estimate(list(mine.values())) if mine else None,
                difference,
                how,
                row.paper_score,
                paper_difference,
                agreement(difference, paper_difference),
            )
        )
    return results


def agreement(difference: Estimate | None, paper_difference: float | None) -> Sign:
    """Whether both mean differences have one sign.

    `no effect`: ours is exactly 0, in float arithmetic of scores in per cent. Empty: there is
    nothing to compare, or the paper's difference is 0 and has no sign.
    """
    if difference is None or not paper_difference:
        return ""
    if abs(difference.mean) <= _ROUNDING:
        return "no effect"
    return "agrees" if difference.mean * paper_difference > 0 else "differs"


def conclusion(collection: Collection, table: Sequence[RowResult]) -> list[str]:
    """Sentences below the table."""
    lines = _signs(collection, [row for row in table if row.sign])
    how = {row.how for row in table if row.how}
    lines.append(
        f"Scores: avg@k of the last evaluation{_within(collection)}, per cent. Intervals: 95 %, "
        "Student's t over seeds"
        + (f"; differences {' or '.join(sorted(how))} by seed" if how else "")
        + ". A single seed has no interval."
    )
    if collection.missing:
        lines.append(f"Not in the table: {', '.join(collection.missing)}.")
    if early := [
        f"{r.row}/{r.seed}" for r in collection.runs if r.score(collection.within) is None
    ]:
        lines.append(f"Left out, no evaluation{_within(collection)}: {', '.join(early)}.")
    return [*lines, *collection.notes]


def _signs(collection: Collection, judged: Sequence[RowResult]) -> list[str]:
    """How many rows have the paper's sign, and what the intervals say of that."""
    if not judged:
        return []
    clear = [row.sign for row in judged if row.is_shown]
    signs = [row.sign for row in judged]
    text = (
        f"The difference to {collection.full_system} has the paper's sign in "
        f"{signs.count('agrees')} of {len(judged)} rows, beyond the interval in "
        f"{clear.count('agrees')} of them; it has the other sign beyond the interval in "
        f"{clear.count('differs')}."
    )
    if zeros := signs.count("no effect"):
        text += f" It is exactly 0 (no effect) in {zeros}."
    unclear = sum(row.is_shown is False for row in judged if row.sign != "no effect")
    if unclear:
        text += f" Where it is not 0, the interval holds 0 in {unclear} (no difference shown)."
    return [text]


def _within(collection: Collection) -> str:
    if collection.within is None:
        return ""
    return f" within {collection.within} optimizer steps of the policy"


def _scores(collection: Collection, row: str) -> dict[int, float]:
    """Seed -> score in per cent."""
    scores: dict[int, float | None] = {}
    for run in collection.of_row(row):
        if run.seed in scores:
            raise ValueError(f"two runs of row {row} and seed {run.seed}")
        scores[run.seed] = run.score(collection.within)
    return {seed: 100 * score for seed, score in scores.items() if score is not None}
