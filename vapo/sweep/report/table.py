"""The table: mean and interval over seeds, difference to the full system, the paper beside it.

Scores are in per cent. Intervals are 95 % t-intervals over seeds: they say how much training
runs differ, not how much a held-out set of another make would change the score. Where some seeds
collapse and others do not, no such interval holds, and every seed is shown instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev, variance
from typing import Any, Literal

import numpy as np
from scipy.stats import permutation_test
from scipy.stats import t as students_t

from vapo.sweep.report.runs import Collection

Sign = Literal["agrees", "differs", "no effect", ""]
_ROUNDING = 1e-9  # per cent: what float arithmetic may leave of a difference of 0
COLLAPSE_SPREAD = 10.0  # points of standard deviation over seeds; of one kind they have 2 to 6


@dataclass(frozen=True)
class MeanOfSeeds:
    """A mean; `interval` None where one run, or none that can be paired, gives no spread.

    Where seeds collapse it is None too: `seeds` has each one's number then, and a difference the
    `p` of a permutation test. With one seed in five collapsed, t-intervals of five cover the mean
    in 67 % of the cases, not in 95.
    """

    mean: float
    interval: tuple[float, float] | None = None
    seeds: tuple[float, ...] = ()
    p: float | None = None

    @property
    def is_clear(self) -> bool | None:
        """Whether the interval leaves zero out, by more than what float arithmetic may add; of
        seeds that collapse, whether p is below 5 %. None where nothing is known of the spread."""
        if self.p is not None:
            return self.p < 0.05
        if self.interval is None:
            return None
        return self.interval[0] > _ROUNDING or self.interval[1] < -_ROUNDING


@dataclass(frozen=True)
class RowResult:
    """One line. `sign`: that of the mean difference against the paper's; see `agreement`.

    `common_seeds`: how many the difference is over, where that is not all of both rows'.
    """

    name: str
    num_runs: int
    score: MeanOfSeeds | None
    difference: MeanOfSeeds | None
    how: str
    paper_score: float | None
    paper_difference: float | None
    sign: Sign
    common_seeds: int | None = None

    @property
    def is_shown(self) -> bool | None:
        """Whether the difference is clear; None where nothing is known of its spread."""
        return None if self.difference is None else self.difference.is_clear


def estimate(values: Sequence[float]) -> MeanOfSeeds:
    """Mean +- t(0.975, n - 1) s / sqrt(n), or each seed where some collapse."""
    mean = fmean(values)
    if len(values) < 2:
        return MeanOfSeeds(mean)
    if stdev(values) > COLLAPSE_SPREAD:
        return MeanOfSeeds(mean, seeds=tuple(values))
    half = quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return MeanOfSeeds(mean, (mean - half, mean + half))


def compare(scores: Mapping[int, float], full: Mapping[int, float]) -> tuple[MeanOfSeeds, str]:
    """Row minus full system: paired where the seeds are common, else Welch's interval.

    Seeds fix prompts, evaluation and value pretraining, so pairing takes their part of the
    spread out. Where seeds collapse the p value is of a permutation test: the signs of paired
    differences, or the rows of unpaired runs, are as likely as any other if the rows are alike.
    """
    common = sorted(scores.keys() & full.keys())
    if len(common) >= 2 or (common and min(len(scores), len(full)) < 2):
        differences = [scores[seed] - full[seed] for seed in common]
        found = estimate(differences)
        if found.seeds:
            found = replace(found, p=_permutation_p([differences], "samples"))
        return found, "paired"
    both = [list(values.values()) for values in (scores, full)]
    mean = fmean(both[0]) - fmean(both[1])
    if min(map(len, both)) < 2:
        return MeanOfSeeds(mean), "unpaired"
    if max(map(stdev, both)) > COLLAPSE_SPREAD:
        return MeanOfSeeds(mean, p=_permutation_p(both, "independent")), "unpaired"
    parts = [variance(values) / len(values) for values in both]
    if sum(parts) == 0:
        return MeanOfSeeds(mean, (mean, mean)), "unpaired"
    degrees = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, both, strict=True)
    )
    half = quantile(degrees) * math.sqrt(sum(parts))
    return MeanOfSeeds(mean, (mean - half, mean + half)), "unpaired"


def _permutation_p(samples: Sequence[Sequence[float]], kind: str) -> float:
    def difference(*samples: np.ndarray, axis: int) -> Any:
        means = [np.mean(values, axis=axis) for values in samples]
        return means[0] - sum(means[1:])

    found = permutation_test(
        samples, difference, permutation_type=kind, vectorized=True, rng=np.random.default_rng(0)
    )
    return float(found.pvalue)


def quantile(degrees: float) -> float:
    return float(students_t.ppf(0.975, degrees))


def elsewhere(collection: Collection) -> list[str]:
    """The rows that were scored on other held-out prompts than the full system with a seed of both,
    so that a difference of such scores is one of the prompts, too."""
    heldout: dict[str, dict[int, str | None]] = {row.name: {} for row in collection.rows}
    for run in collection.runs:
        heldout[run.row][run.seed] = run.heldout
    full = heldout.get(collection.full_system or "", {})
    return [
        name
        for name, own in heldout.items()
        if any(None not in (own[s], full[s]) and own[s] != full[s] for s in own.keys() & full)
    ]


def make_table(collection: Collection) -> list[RowResult]:
    """Every row of the collection, in its order, whether it has runs or not."""
    scores = {row.name: _scores(collection, row.name) for row in collection.rows}
    paper = {row.name: row.paper_score for row in collection.rows}
    full = scores.get(collection.full_system or "", {})
    # a sweep's rows are of one grid, which may change how the same problems are put
    apart = [] if collection.parent_run_id else elsewhere(collection)
    full_paper = paper.get(collection.full_system or "")
    results = []
    for name, mine in scores.items():
        difference, how, paper_difference, common_seeds = None, "", None, None
        if name != collection.full_system:
            if mine and full and name not in apart:
                difference, how = compare(mine, full)
            common = len(mine.keys() & full.keys())
            if how == "paired" and common < max(len(mine), len(full)):
                common_seeds = common
            if (score := paper[name]) is not None and full_paper is not None:
                paper_difference = score - full_paper
        results.append(
            RowResult(
                name,
                len(mine),
                estimate(list(mine.values())) if mine else None,
                difference,
                how,
                paper[name],
                paper_difference,
                agreement(difference, paper_difference),
                common_seeds,
            )
        )
    return results


def agreement(difference: MeanOfSeeds | None, paper_difference: float | None) -> Sign:
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
    steps = collection.within
    within = "" if steps is None else f" within {steps} optimizer steps of the policy"
    scores = [f"Scores: avg@k of the last evaluation{within}, per cent."]
    estimates = [e for row in table for e in (row.score, row.difference) if e is not None]
    if any(one.interval for one in estimates):
        paired = f"; differences {' or '.join(sorted(how))} by seed" if how else ""
        scores.append(f"Intervals: 95 %, Student's t over seeds{paired}.")
    if any(one.seeds or one.p is not None for one in estimates):
        scores.append(
            "Where the seeds differ by more than 10 points (standard deviation), because some "
            "collapse, each is shown in place of an interval; p: sign flips of the paired "
            "differences, or permutations of unpaired runs."
        )
    lines.append(" ".join([*scores, "A single seed has no interval."]))
    if early := [f"{run.row}/{run.seed}" for run in collection.runs if run.score(steps) is None]:
        lines.append(f"Left out, no evaluation{within}: {', '.join(early)}.")
    if others := elsewhere(collection):
        names, full = ", ".join(others), collection.full_system
        if collection.parent_run_id:
            lines.append(f"Scored on other held-out prompts than {full}: {names}.")
        else:
            lines.append(
                f"No difference to {full}, since the held-out prompts are others: {names}."
            )
    return [*lines, *collection.notes]


def _signs(collection: Collection, judged: Sequence[RowResult]) -> list[str]:
    """How many rows have the paper's sign, and what the intervals say of that."""
    if not judged:
        return []
    clear = [row.sign for row in judged if row.is_shown]
    known = [row.sign for row in judged if row.is_shown is not None]
    signs = [row.sign for row in judged]
    text = (
        f"The difference to {collection.full_system} has the paper's sign in "
        f"{signs.count('agrees')} of {len(judged)} rows"
    )
    if known:
        of = "them" if len(known) == len(judged) else f"{known.count('agrees')} that have one"
        text += (
            f", beyond the interval in {clear.count('agrees')} of {of}; it has the other sign "
            f"beyond the interval in {clear.count('differs')}."
        )
    else:
        text += ". No difference has an interval, which takes two seeds."
    if zeros := signs.count("no effect"):
        text += f" It is exactly 0 (no effect) in {zeros}."
    if unclear := sum(row.is_shown is False for row in judged if row.sign != "no effect"):
        text += f" Where it is not 0, the interval holds 0 in {unclear} (no difference shown)."
    return [text]


def _scores(collection: Collection, row: str) -> dict[int, float]:
    """Seed -> score in per cent."""
    runs = [run for run in collection.runs if run.row == row]
    for run in runs:
        if sum(other.seed == run.seed for other in runs) > 1:
            raise ValueError(f"two runs of row {row} and seed {run.seed}")
    scores = {run.seed: run.score(collection.within) for run in runs}
    return {seed: 100 * score for seed, score in scores.items() if score is not None}
