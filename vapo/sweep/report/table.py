"""The table: each row's scores with intervals, differences to the full system, the paper's beside.

Scores are in per cent. An interval is over seeds and prompts together where the runs recorded what
they made of each prompt, and else over seeds alone: then it says how much training runs differ, not
how much other prompts would change the score. Where some seeds collapse and others do not, no such
interval holds, and every seed is shown instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vapo.sweep.report.crossed import PromptMeans
from vapo.sweep.report.estimates import ROUNDING, MeanOfSeeds, compare, estimate
from vapo.sweep.report.rows import SCORE
from vapo.sweep.report.run_records import AVERAGE, FRESH, RECENT, SCORES
from vapo.sweep.report.runs import Collection

Sign = Literal["agrees", "differs", "no effect", ""]


@dataclass(frozen=True)
class Compared:
    """A row's score of one kind, and its difference to the full system's.

    `common_seeds`: how many the difference is over, where that is not all of both rows'.
    """

    score: MeanOfSeeds | None
    difference: MeanOfSeeds | None = None
    how: str = ""
    common_seeds: int | None = None


@dataclass(frozen=True)
class RowResult:
    """One line. `sign`: that of the mean difference against the paper's; see `agreement`.

    `common_seeds`: how many the difference is over, where that is not all of both rows'. `others`
    are the scores beside the last evaluation's, by their metrics, as far as they were recorded.
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
    others: Mapping[str, Compared] = field(default_factory=dict)

    @property
    def is_shown(self) -> bool | None:
        """Whether the difference is clear; None where nothing is known of its spread."""
        return None if self.difference is None else self.difference.is_clear


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
    paper = {row.name: row.paper_score for row in collection.rows}
    full_paper = paper.get(collection.full_system or "")
    compared = {key: compare_rows(collection, key) for key in SCORES}
    results = []
    for name, paper_score in paper.items():
        main, paper_difference = compared[SCORE][name], None
        is_full = name == collection.full_system
        if not is_full and paper_score is not None and full_paper is not None:
            paper_difference = paper_score - full_paper
        others = {key: rows[name] for key, rows in compared.items() if key != SCORE}
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
                {key: other for key, other in others.items() if other.score is not None},
            )
        )
    return results


def compare_rows(collection: Collection, key: str) -> dict[str, Compared]:
    """Each row's score of this kind, and its difference to the full system's."""
    full_system = collection.full_system or ""
    scores = {row.name: _scores(collection, row.name, key) for row in collection.rows}
    prompts = {row.name: _prompts(collection, row.name, key) for row in collection.rows}
    full = scores.get(full_system, {})
    # a sweep's rows are of one grid, which may change how the same problems are put
    is_apart = key != FRESH and not collection.parent_run_id
    apart = elsewhere(collection) if is_apart else []
    found = {}
    for name, mine in scores.items():
        if not mine:
            found[name] = Compared(None)
            continue
        score = estimate(list(mine.values()), [prompts[name][seed] for seed in mine])
        if name == full_system or not full or name in apart:
            found[name] = Compared(score)
            continue
        difference, how = compare(mine, full, (prompts[name], prompts[full_system]))
        common = len(mine.keys() & full.keys())
        is_part = how == "paired" and common < max(len(mine), len(full))
        found[name] = Compared(score, difference, how, common if is_part else None)
    return found


def agreement(difference: MeanOfSeeds | None, paper_difference: float | None) -> Sign:
    """Whether both mean differences have one sign.

    `no effect`: ours is exactly 0, in float arithmetic of scores in per cent. Empty: there is
    nothing to compare, or the paper's difference is 0 and has no sign.
    """
    if difference is None or not paper_difference:
        return ""
    if abs(difference.mean) <= ROUNDING:
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
        scores.append(f"Intervals: 95 %, {_over(table)}{paired}.")
    if any(one.seeds or one.p is not None for one in estimates):
        scores.append(
            "Where the seeds differ by more than 10 points (standard deviation), because some "
            "collapse, each is shown in place of an interval; p: sign flips of the paired "
            "differences, or permutations of unpaired runs."
        )
    if any(one.over == "prompts" for one in estimates):
        scores.append("A single seed says nothing of other training runs.")
    else:
        scores.append("A single seed has no interval.")
    lines += [" ".join(scores), *_beside(table)]
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


def _over(table: Sequence[RowResult]) -> str:
    """What the intervals of scores and differences are over, with the rows where that differs."""
    rows: dict[str, dict[str, None]] = {}
    for row in table:
        for one in (row.score, row.difference):
            if one is not None and one.over:
                rows.setdefault(one.over, {})[row.name] = None
    said = {
        "seeds and prompts": "over seeds and prompts together",
        "seeds": "Student's t over seeds",
        "prompts": "Student's t over the prompts of a single seed",
    }
    if len(rows) == 1:
        return said[next(iter(rows))]
    said["seeds"] += ", for these very prompts"
    return ", ".join(f"{text} ({', '.join(rows[o])})" for o, text in said.items() if o in rows)


def _beside(table: Sequence[RowResult]) -> list[str]:
    """A sentence on each other score that the table shows."""
    sentences = {
        FRESH: "Fresh prompts: the accuracy of the policy's last training batches, each scored "
        "before it was trained on. Every seed has prompts of its own, so an interval over seeds "
        "is one over prompts, too.",
        RECENT: "Last policies: the mean over up to four evaluated policies.",
        AVERAGE: "Averaged: the policy with the mean of the last policies' weights.",
    }
    return [text for key, text in sentences.items() if key in shown_scores(table)]


def shown_scores(table: Sequence[RowResult]) -> list[str]:
    """The scores beside the last evaluation's that any row has, and that say something else."""
    return [
        key
        for key in SCORES[1:]
        if any(key in row.others and row.others[key].score != row.score for row in table)
    ]


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


def _scores(collection: Collection, row: str, key: str) -> dict[int, float]:
    """Seed -> score in per cent."""
    runs = [run for run in collection.runs if run.row == row]
    for run in runs:
        if sum(other.seed == run.seed for other in runs) > 1:
            raise ValueError(f"two runs of row {row} and seed {run.seed}")
    scores = {run.seed: run.score(collection.within, key) for run in runs}
    return {seed: 100 * score for seed, score in scores.items() if score is not None}


def _prompts(collection: Collection, row: str, key: str) -> dict[int, PromptMeans]:
    """Seed -> what its policy made of each prompt; nothing where the run has not recorded it."""
    runs = (run for run in collection.runs if run.row == row)
    return {run.seed: run.prompt_means(key, collection.within) for run in runs}
