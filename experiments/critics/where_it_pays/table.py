"""The map from the runs' results: differences with intervals, as a table and a picture.

    python experiments/critics/where_it_pays/table.py

A difference is between two systems of one cell (steps, group size), whose runs of a seed have the
same prompts. Its interval is over seeds and held-out prompts together: the variance between seeds
is pooled over the group sizes of a number of steps, because three seeds alone do not say it, and
that of the prompts' mean differences is added. Student's t has the degrees of freedom of the pooled
variance. A cell is clear if 0 is outside of its interval, and clear of all if it still is when the
level is divided by the number of cells and systems that are compared (Bonferroni).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from run import (
    BATCH_MEAN,
    BY_LENGTH,
    GROUP_SIZES,
    ITERATIONS,
    LAMBDA_1,
    RESULTS,
    SCORED,
    SIZES,
    TRUSTED,
    VAPO,
)

from vapo.intervals import interval_text, t_half_width, t_quantile
from vapo.sweep.report.tables import markdown_table

FOLDER = Path(__file__).parent
MAP_SEEDS = (0, 1, 2)
AGAIN = ("VAPO", "trusted", "VAPO, fresh", "trusted, fresh", "VAPO, counted", "trusted, counted")
Run = Mapping[str, Any]


class Difference(NamedTuple):
    """In points. `seeds` are the single differences, `limits_of_all` those after Bonferroni."""

    mean: float
    limits: tuple[float, float]
    limits_of_all: tuple[float, float]
    seeds: tuple[float, ...]

    @property
    def is_clear(self) -> bool:
        return self.limits[0] > 0 or self.limits[1] < 0

    @property
    def is_clear_of_all(self) -> bool:
        return self.limits_of_all[0] > 0 or self.limits_of_all[1] < 0


def held_out(run: Run) -> tuple[float, np.ndarray | None]:
    """The mean over the last policies: of all held-out prompts, and of each of them."""
    return right_shares(run, "")


def held_out_later(run: Run) -> tuple[float, np.ndarray | None]:
    """The same after as many more responses as a critic was trained on."""
    return right_shares(run, "later_")


def right_shares(run: Run, window: str) -> tuple[float, np.ndarray]:
    """The share of right responses of the policies of a window, and that of each prompt."""
    right = np.array([int(digit) for digit in run[f"{window}right"]]) / SCORED
    return float(right.mean()), right


def fresh(run: Run) -> tuple[float, np.ndarray | None]:
    """The accuracy of the last batches of the compared iterations, each before its update."""
    return float(np.mean(run["rollout/accuracy"][ITERATIONS - SCORED : ITERATIONS])), None


def differences(
    runs: Sequence[Run],
    system: str,
    score: Any = held_out,
    other: Any = None,
    reference: str = LAMBDA_1,
) -> dict[tuple[int, int], Difference]:
    """By steps and group size, the system less the reference, the loss without a critic.

    `score` gives a run's score and its prompts'; `other` is the one of the reference.
    """
    by_key = {(r["size"], r["group_size"], r["system"], r["seed"]): r for r in runs}
    seeds = sorted({r["seed"] for r in runs})
    single: dict[tuple[int, int], list[float]] = {}
    prompts: dict[tuple[int, int], list[np.ndarray]] = {}
    for size, group in ((size, group) for size in SIZES for group in GROUP_SIZES):
        for seed in seeds:
            system_score = by_key.get((size, group, system, seed))
            reference_score = by_key.get((size, group, reference, seed))
            if system_score is None or reference_score is None:
                continue
            (a, of_a), (b, of_b) = score(system_score), (other or score)(reference_score)
            single.setdefault((size, group), []).append(100 * (a - b))
            if of_a is not None and of_b is not None:
                prompts.setdefault((size, group), []).append(100 * (of_a - of_b))
    return {cell: interval(cell, single, prompts.get(cell), 2 * len(single)) for cell in single}


def interval(
    cell: tuple[int, int],
    single: Mapping[tuple[int, int], Sequence[float]],
    prompts: Sequence[np.ndarray] | None,
    comparisons: int,
) -> Difference:
    """The interval of one cell; see the top of the file."""
    of_size = [v for (size, _), v in single.items() if size == cell[0] and len(v) > 1]
    freedom = sum(len(values) - 1 for values in of_size)
    mean, values = float(np.mean(single[cell])), tuple(single[cell])
    if freedom == 0:
        endless = (-np.inf, np.inf)
        return Difference(mean, endless, endless, values)
    pooled = sum(np.var(values, ddof=1) * (len(values) - 1) for values in of_size) / freedom
    of_prompts = 0.0
    if prompts is not None:
        per_prompt = np.mean(prompts, axis=0)
        of_prompts = float(np.var(per_prompt, ddof=1) / len(per_prompt))
    error = float(np.sqrt(pooled / len(values) + of_prompts))
    limits = []
    for level in (0.05, 0.05 / comparisons):
        width = t_quantile(freedom, 1 - level / 2) * error
        limits.append((mean - width, mean + width))
    return Difference(mean, limits[0], limits[1], values)


def mean_over(
    differences: Mapping[tuple[int, int], Difference], cells: Sequence[tuple[int, int]]
) -> tuple[float, float, float]:
    """The mean of several cells with its interval, over seeds: each has one mean over the cells."""
    by_seed = np.array([differences[cell].seeds for cell in cells if cell in differences]).mean(
        axis=0
    )
    mean, width = float(by_seed.mean()), t_half_width(by_seed.tolist())
    return mean, mean - width, mean + width


def shown(difference: Difference | None) -> str:
    if difference is None:
        return ""
    text = interval_text(difference.mean, difference.limits, "+.1f")
    mark = " (all)" if difference.is_clear_of_all else ""
    return f"**{text}**{mark}" if difference.is_clear else text


def shown_mean(limits: tuple[float, float, float]) -> str:
    mean, low, high = limits
    text = interval_text(mean, (low, high), "+.1f")
    return f"**{text}**" if low > 0 or high < 0 else text


def scores(runs: Sequence[Run], size: int, group: int, system: str) -> str:
    cell = (size, group, system)
    scores = [r["score"] for r in runs if (r["size"], r["group_size"], r["system"]) == cell]
    return f"{100 * np.mean(scores):.1f}" if scores else ""


def columns(runs: Sequence[Run]) -> dict[str, dict[tuple[int, int], Difference]]:
    """The compared columns by their names."""
    return {
        "VAPO": differences(runs, VAPO),
        "trusted": differences(runs, TRUSTED),
        "VAPO, fresh": differences(runs, VAPO, fresh),
        "trusted, fresh": differences(runs, TRUSTED, fresh),
        "VAPO, counted": differences(runs, VAPO, held_out, held_out_later),
        "trusted, counted": differences(runs, TRUSTED, held_out, held_out_later),
        "by length": differences(runs, BY_LENGTH),
    }


def table(runs: Sequence[Run]) -> str:
    """The Markdown table with a row for each cell."""
    differences = columns(runs)
    rows = [
        [
            *(str(cell[0]), str(cell[1]), scores(runs, *cell, LAMBDA_1)),
            *(shown(column.get(cell)) for column in differences.values()),
        ]
        for cell in ((size, group) for size in SIZES for group in GROUP_SIZES)
    ]
    titles = ["steps", "group", "without a critic", *differences]
    return markdown_table(titles, rows, align="rrrl") + "\n"


def pooled(runs: Sequence[Run]) -> str:
    """Markdown: means over group sizes, over steps, and over all."""
    differences = columns(runs)
    parts = {f"{size} steps": [(size, g) for g in GROUP_SIZES] for size in SIZES}
    parts |= {f"groups of {g}": [(size, g) for size in SIZES] for g in GROUP_SIZES}
    parts |= {"all": [(size, g) for size in SIZES for g in GROUP_SIZES]}
    rows = [
        [
            name,
            *(
                shown_mean(mean_over(column, cells)) if set(cells) & set(column) else ""
                for column in differences.values()
            ),
        ]
        for name, cells in parts.items()
    ]
    return markdown_table(["mean over", *differences], rows) + "\n"


def is_whole(difference: Difference | None) -> bool:
    """Whether a cell was run again with three seeds."""
    return difference is not None and len(difference.seeds) >= len(MAP_SEEDS)


def again(runs: Sequence[Run], second: Sequence[Run]) -> str:
    """Markdown: the cells that were run once more, by the seeds that had no part in choosing them,
    and by all their seeds. An interval is that of the cell's own seeds, nothing is pooled."""
    new = columns(second)
    shared_cells = {
        cell for cell in new["VAPO"] if all(is_whole(new[name].get(cell)) for name in AGAIN)
    }
    lines = []
    for label, part in (("new", second), ("all", runs)):
        part_columns = columns(part)
        rows = [(str(size), group, [(size, group)]) for size, group in sorted(shared_cells)]
        rows += [
            ("mean", group, sorted(cell for cell in shared_cells if cell[1] == group))
            for group in sorted({group for _, group in shared_cells})
        ]
        for name, group, cells in rows:
            texts = [shown_mean(mean_over(part_columns[column], cells)) for column in AGAIN]
            lines.append([name, str(group), label, *texts])
    return markdown_table(["steps", "group", "seeds", *AGAIN], lines, align="rrl") + "\n"


def across(runs: Sequence[Run]) -> str:
    """Markdown: by group size and system, the mean score over the sizes, and how far it is ahead of
    the loss without a critic whose baseline is the batch's mean, one response per prompt."""
    by_key = {(r["size"], r["group_size"], r["system"], r["seed"]): r["score"] for r in runs}
    systems = (LAMBDA_1, VAPO, TRUSTED)
    rows = []
    for group in GROUP_SIZES:
        texts = [str(group)]
        for system in systems:
            scores_of = [[by_key[n, group, system, s] for n in SIZES] for s in MAP_SEEDS]
            beside = [[by_key[n, 1, LAMBDA_1, s] for n in SIZES] for s in MAP_SEEDS]
            ahead = 100 * (np.mean(scores_of, axis=1) - np.mean(beside, axis=1))
            single = Difference(float(ahead.mean()), (0, 0), (0, 0), tuple(ahead))
            is_itself = (group, system) == (1, LAMBDA_1)
            text = "" if is_itself else f", {shown_mean(mean_over({(0, 0): single}, [(0, 0)]))}"
            texts.append(f"{100 * np.mean(scores_of):.1f}{text}")
        rows.append(texts)
    return markdown_table(["group", *systems], rows, align="rl") + "\n"


def beside_batch_mean(runs: Sequence[Run]) -> str:
    """Markdown: groups of two, the baselines without a critic and the systems with one.

    All seeds; the last row is the mean over the sizes, with its interval over seeds.
    """
    columns = {
        "batch's mean less group's other": differences(runs, BATCH_MEAN),
        "VAPO less batch's mean": differences(runs, VAPO, reference=BATCH_MEAN),
        "trusted less batch's mean": differences(runs, TRUSTED, reference=BATCH_MEAN),
        "the last, fresh": differences(runs, TRUSTED, fresh, reference=BATCH_MEAN),
    }
    rows = [(str(size), [(size, 2)]) for size in SIZES]
    rows.append(("mean", [(size, 2) for size in SIZES]))
    lines = [
        [name, *(shown_mean(mean_over(column, cells)) for column in columns.values())]
        for name, cells in rows
    ]
    return markdown_table(["steps", *columns], lines, align="rl") + "\n"


def report(runs: Sequence[Run]) -> str:
    """The map, its means, the cells that were run again, and the control of groups of two."""
    first = [run for run in runs if run["seed"] in MAP_SEEDS]
    second = [run for run in runs if run["seed"] not in MAP_SEEDS]
    parts = [table(first), pooled(first), across(first), *([again(runs, second)] if second else [])]
    if any(run["system"] == BATCH_MEAN for run in runs):
        parts.append(beside_batch_mean(runs))
    return "\n".join(parts)


def read_runs() -> list[Run]:
    lines = (json.loads(line) for line in RESULTS.read_text().splitlines())
    return [
        line_row for line_row in lines if line_row["kind"] == "run" and line_row["rate"] is None
    ]


def main() -> None:
    from picture import draw

    runs = read_runs()
    (FOLDER / "table.md").write_text(report(runs))
    print(report(runs))
    first = [run for run in runs if run["seed"] in MAP_SEEDS]
    draw(columns(first), json.loads((FOLDER / "surrogate.json").read_text()), FOLDER / "map.png")


if __name__ == "__main__":
    main()
