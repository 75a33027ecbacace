"""What each part of the loss and each kind of advantages is worth in `results_loss_parts.json`.

    python experiments/smollm2/effects.py [results_loss_parts.json]

The effect on four scores is printed. Two are held out: after each policy's own number of iterations
(20 with a group's advantages, else 16, since all sample 20 batches) and after 16 of each. Two are
of training, on prompts that no batch before had: the mean accuracy of batches 13 to 16 and of
batches 9 to 16. Their prompts are the same for all rows of a seed. Runs of one seed share prompts
and random numbers, so a seed is one observation: a difference is taken within it, and the interval
(95 %, Student's t) is over seeds.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collect import shown

from vapo.sweep.report.estimates import estimate
from vapo.sweep.report.tables import markdown_table

OUTPUT = Path(__file__).parent / "results_loss_parts.json"
Row = Mapping[str, Any]
FIGURES: dict[str, Callable[[Row], float]] = {
    "held out": lambda row: 100 * row["after"],
    "held out, after 16 iterations": lambda row: 100 * row["scores"][1],
    "batches 13 to 16": lambda row: 100 * statistics.fmean(row["accuracy"][12:16]),
    "batches 9 to 16": lambda row: 100 * statistics.fmean(row["accuracy"][8:16]),
}


def parts(row: Row) -> tuple[str, ...]:
    return tuple(row["system"].split(", "))


def _has(part: str) -> Callable[[Row], bool]:
    return lambda row: part in parts(row)


def _lacks(part: str) -> Callable[[Row], bool]:
    return lambda row: part not in parts(row)


CONTRASTS: dict[str, tuple[Callable[[Row], bool], Callable[[Row], bool]]] = {
    "LM loss": (_has("LM"), _lacks("LM")),
    "mean over tokens and clip-higher": (_has("tokens"), _lacks("tokens")),
    "both, against neither": (
        lambda row: {"LM", "tokens"} <= set(parts(row)),
        lambda row: not {"LM", "tokens"} & set(parts(row)),
    ),
    "values with a lambda of 1, against a group's mean": (_has("lambda 1"), _has("group")),
    "lambda by length, against 1": (_has("by length"), _has("lambda 1")),
    "values with lambda by length, against a group's mean": (_has("by length"), _has("group")),
}


def differences(rows: Sequence[Row], contrast: str, figure: str) -> list[float]:
    """One for each seed: the mean of the rows with it, less the mean of those without."""
    has, lacks = CONTRASTS[contrast]
    of = FIGURES[figure]
    return [
        statistics.fmean(of(row) for row in rows if row["seed"] == seed and has(row))
        - statistics.fmean(of(row) for row in rows if row["seed"] == seed and lacks(row))
        for seed in sorted({row["seed"] for row in rows})
    ]


def table(rows: Sequence[Row]) -> str:
    rows_of_text = []
    for contrast in CONTRASTS:
        cells = [contrast]
        for figure in FIGURES:
            values = differences(rows, contrast, figure)
            each = ", ".join(f"{value:+.1f}" for value in values)
            cells.append(f"{shown(estimate(values), '+')} ({each})")
        rows_of_text.append(cells)
    return markdown_table(["with, against without", *FIGURES], rows_of_text) + "\n"


def moves(rows: Sequence[Row]) -> list[float]:
    """Points from the last but one to the last score of each run that was scored on its way."""
    return [
        100 * (row["scores"][-1] - row["scores"][-2])
        for row in rows
        if len(row.get("scores", [])) > 2
    ]


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    rows = json.loads(path.read_text(encoding="utf-8"))
    print(table(rows))
    if score_moves := moves(rows):
        spread = math.sqrt(statistics.fmean(move**2 for move in score_moves))
        print(
            f"one run's scores, iteration 16 to 20: {spread:.1f} points in the root mean square of"
        )
        print(f"{len(score_moves)} runs, {min(score_moves):+.1f} to {max(score_moves):+.1f}")


if __name__ == "__main__":
    main()
