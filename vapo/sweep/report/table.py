"""Make the table: scores with intervals, differences to the full system, the paper's scores.

Scores are in per cent. If the runs recorded their scores of single prompts, an interval is over
seeds and prompts together. Otherwise it is over seeds alone: it says how much training runs differ,
not how much other prompts would change the score. If some seeds collapse, neither interval holds,
and every seed is shown instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vapo.sweep.report.estimates import ROUNDING, MeanOfSeeds, PromptMeans, compare, estimate
from vapo.sweep.report.rows import SCORE
from vapo.sweep.report.run_records import AVERAGE, FRESH, RECENT, SCORES
from vapo.sweep.report.runs import Collection

Sign = Literal["agrees", "differs", "no effect", "too few seeds", ""]


@dataclass(frozen=True)
class RowComparison:
    """A row's score of one kind, and its difference to the full system's score.

    Attributes:
        score: None if no run of the row has the score.
        difference: None if the row cannot be compared, or is the full system.
        how: "paired" or "unpaired"; "" without a difference.
        common_seeds: the number of seeds over which the difference is taken; None if these are all
            seeds of both rows.
    """

    score: MeanOfSeeds | None
    difference: MeanOfSeeds | None = None
    how: str = ""
    common_seeds: int | None = None


@dataclass(frozen=True)
class RowResult:
    """One line of the table, for the score of the last evaluation.

    Attributes:
        sign: compares the signs of the mean difference and the paper's difference (`agreement`).
        how, common_seeds: as in `RowComparison`.
        other_scores: metric -> the row's comparison by that score, if it was recorded.
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
    other_scores: Mapping[str, RowComparison] = field(default_factory=dict)

    @property
    def is_shown(self) -> bool | None:
        """Whether the difference is clear; None if it is unknown how much runs differ."""
        return None if self.difference is None else self.difference.is_clear


def rows_on_other_prompts(collection: Collection) -> list[str]:
    """Return the rows that were scored on other held-out prompts than the full system.

    A row is among them if this holds for any seed that both have. A difference of such scores would
    be due to the prompts as well.
    """
    heldout: dict[str, dict[int, str | None]] = {row.name: {} for row in collection.rows}
    for run in collection.runs:
        heldout[run.row][run.seed] = run.heldout
    full = heldout.get(collection.full_system or "", {})
    return [
        name
        for name, row_heldout in heldout.items()
        if any(
            None not in (row_heldout[s], full[s]) and row_heldout[s] != full[s]
            for s in row_heldout.keys() & full
        )
    ]


def make_table(collection: Collection) -> list[RowResult]:
    """Return a line for every row of the collection, in its order. A row may have no runs."""
    paper = {row.name: row.paper_score for row in collection.rows}
    full_paper = paper.get(collection.full_system or "")
    compared = {key: compare_rows(collection, key) for key in SCORES}
    results = []
    for name, paper_score in paper.items():
        main, paper_difference = compared[SCORE][name], None
        is_full = name == collection.full_system
        if not is_full and paper_score is not None and full_paper is not None:
            paper_difference = paper_score - full_paper
        other_scores = {key: rows[name] for key, rows in compared.items() if key != SCORE}
        results.append(
            RowResult(
                name,
                len(_scores(collection, name, SCORE)),
                main.score,
                main.difference,
                main.how,
                paper_score,
                paper_difference,
                agreement(main.difference, paper_difference),
                main.common_seeds,
                {
                    key: comparison
                    for key, comparison in other_scores.items()
                    if comparison.score is not None
                },
            )
        )
    return results


def compare_rows(collection: Collection, key: str) -> dict[str, RowComparison]:
    """Return row -> its score `key` over seeds, in per cent, and the difference to the full system.

    There is no difference for the full system itself, if either lacks the score, or for a row that
    was scored on other held-out prompts.
    """
    full_system = collection.full_system or ""
    scores = {row.name: _scores(collection, row.name, key) for row in collection.rows}
    prompts = {row.name: _prompts(collection, row.name, key) for row in collection.rows}
    full = scores.get(full_system, {})
    # The rows of a sweep may put the same problems in other words, and are still compared.
    can_be_incomparable = key != FRESH and not collection.parent_run_id
    incomparable = rows_on_other_prompts(collection) if can_be_incomparable else []
    comparisons = {}
    for name, row_scores in scores.items():
        if not row_scores:
            comparisons[name] = RowComparison(None)
            continue
        score = estimate(list(row_scores.values()), [prompts[name][seed] for seed in row_scores])
        if name == full_system or not full or name in incomparable:
            comparisons[name] = RowComparison(score)
            continue
        difference, how = compare(row_scores, full, (prompts[name], prompts[full_system]))
        common = len(row_scores.keys() & full.keys())
        is_part = how == "paired" and common < max(len(row_scores), len(full))
        comparisons[name] = RowComparison(score, difference, how, common if is_part else None)
    return comparisons


def agreement(difference: MeanOfSeeds | None, paper_difference: float | None) -> Sign:
    """Return whether our mean difference has the sign of the paper's difference.

    "no effect" means that ours is 0, up to rounding. "too few seeds" means that it is unknown how
    much training runs differ, so that its sign says nothing. The result is "" if there is nothing
    to compare, or if the paper's difference is 0.
    """
    if difference is None or not paper_difference:
        return ""
    if abs(difference.mean) <= ROUNDING:
        return "no effect"
    if difference.is_clear is None:
        return "too few seeds"
    return "agrees" if difference.mean * paper_difference > 0 else "differs"


def conclusion(collection: Collection, table: Sequence[RowResult]) -> list[str]:
    """Return the sentences that stand below the report's table."""
    lines = _signs(collection, [row for row in table if row.sign])
    how = {row.how for row in table if row.how}
    steps = collection.within
    within = "" if steps is None else f" within {steps} optimizer steps of the policy"
    scores = [f"Scores: avg@k of the last evaluation{within}, per cent."]
    estimates = [e for row in table for e in (row.score, row.difference) if e is not None]
    if any(value.interval for value in estimates):
        paired = f"; differences {' or '.join(sorted(how))} by seed" if how else ""
        scores.append(f"Intervals: 95 %, {_describe_intervals(table)}{paired}.")
    if any(value.seeds or value.p is not None for value in estimates):
        scores.append(
            "Where the seeds differ by more than 10 points (standard deviation), because some "
            "collapse, each is shown in place of an interval; p: sign flips of the paired "
            "differences, or permutations of unpaired runs."
        )
    if any(value.over == "prompts" for value in estimates):
        scores.append("A single seed says nothing of other training runs.")
    else:
        scores.append("A single seed has no interval.")
    lines += [" ".join(scores), *_other_score_notes(table)]
    if early := [f"{run.row}/{run.seed}" for run in collection.runs if run.score(steps) is None]:
        lines.append(f"Left out, no evaluation{within}: {', '.join(early)}.")
    if rows_apart := rows_on_other_prompts(collection):
        names, full = ", ".join(rows_apart), collection.full_system
        if collection.parent_run_id:
            lines.append(f"Scored on other held-out prompts than {full}: {names}.")
        else:
            lines.append(
                f"No difference to {full}, since the held-out prompts are others: {names}."
            )
    return [*lines, *collection.notes]


def _describe_intervals(table: Sequence[RowResult]) -> str:
    """Return whether the intervals are over seeds, prompts or both, with the rows if they
    differ.
    """
    rows: dict[str, dict[str, None]] = {}
    for row in table:
        for value in (row.score, row.difference):
            if value is not None and value.over:
                rows.setdefault(value.over, {})[row.name] = None
    texts = {
        "seeds and prompts": "over seeds and prompts together",
        "seeds": "Student's t over seeds",
        "prompts": "Student's t over the prompts of a single seed",
    }
    if len(rows) == 1:
        return texts[next(iter(rows))]
    texts["seeds"] += ", for these very prompts"
    return ", ".join(f"{text} ({', '.join(rows[o])})" for o, text in texts.items() if o in rows)


def _other_score_notes(table: Sequence[RowResult]) -> list[str]:
    """Return a sentence on each score that the table shows beside the last evaluation's."""
    sentences = {
        FRESH: "Fresh prompts: the accuracy of the policy's last training batches, each scored "
        "before it was trained on. Every seed has prompts of its own, so an interval over seeds "
        "is one over prompts, too.",
        RECENT: "Last policies: the mean over up to four evaluated policies.",
        AVERAGE: "Averaged: the policy with the mean of the last policies' weights.",
    }
    return [text for key, text in sentences.items() if key in shown_scores(table)]


def shown_scores(table: Sequence[RowResult]) -> list[str]:
    """Return the further scores that the table shows, by their metrics.

    They are those that differ from the last evaluation's score in some row.
    """
    return [
        key
        for key in SCORES[1:]
        if any(
            key in row.other_scores and row.other_scores[key].score != row.score for row in table
        )
    ]


def _signs(collection: Collection, rows: Sequence[RowResult]) -> list[str]:
    """Return a sentence on how many differences have the paper's sign; [] without rows."""
    if not rows:
        return []
    judged = [row for row in rows if row.sign != "too few seeds"]
    too_few = len(rows) - len(judged)
    if not judged:
        return ["No difference has an interval, which takes two seeds, so no sign is compared."]
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
    if unclear := sum(row.is_shown is False for row in judged if row.sign != "no effect"):
        text += f" Where it is not 0, the interval holds 0 in {unclear} (no difference shown)."
    if too_few:
        text += f" Rows with too few seeds to say: {too_few}."
    return [text]


def _scores(collection: Collection, row: str, key: str) -> dict[int, float]:
    """Return seed -> a row's score in per cent. Seeds without a score are left out."""
    runs = [run for run in collection.runs if run.row == row]
    for run in runs:
        if sum(other_run.seed == run.seed for other_run in runs) > 1:
            raise ValueError(f"two runs of row {row} and seed {run.seed}")
    scores = {run.seed: run.score(collection.within, key) for run in runs}
    return {seed: 100 * score for seed, score in scores.items() if score is not None}


def _prompts(collection: Collection, row: str, key: str) -> dict[int, PromptMeans]:
    """Return seed -> a row's scores of single prompts, which are empty if a run has none."""
    runs = (run for run in collection.runs if run.row == row)
    return {run.seed: run.prompt_means(key, collection.within) for run in runs}
