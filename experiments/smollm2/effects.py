"""What each part of the loss and each kind of advantages is worth in `results_loss_parts.json`.

    python experiments/smollm2/effects.py [results_loss_parts.json]

Held out, each with its own number of the policy's iterations (20 batches are sampled by all), and
in training as the mean accuracy of batches 13 to 16, whose prompts are the same for all rows of a
seed. Runs of one seed share prompts and random numbers, so a seed is one observation: a difference
is taken within it, and the interval (95 %, Student's t) is over seeds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from collect import mean_and_interval

OUTPUT = Path(__file__).parent / "results_loss_parts.json"
Row = Mapping[str, Any]
BATCHES = slice(12, 16)
FIGURES: dict[str, Callable[[Row], float]] = {
    "held out": lambda row: 100 * row["after"],
    "batches 13 to 16": lambda row: 100 * statistics.fmean(row["accuracy"][BATCHES]),
}


def parts(row: Row) -> tuple[str, ...]:
    return tuple(row["system"].split(", "))


CONTRASTS: dict[str, tuple[Callable[[Row], bool], Callable[[Row], bool]]] = {
    "LM loss": (lambda row: "LM" in parts(row), lambda row: "LM" not in parts(row)),
    "mean over tokens and clip-higher": (
        lambda row: "tokens" in parts(row),
        lambda row: "tokens" not in parts(row),
    ),
    "values with lambda 1, against a group's mean": (
        lambda row: parts(row)[0] == "lambda 1",
        lambda row: parts(row)[0] == "group",
    ),
    "lambda by length, against lambda 1": (
        lambda row: parts(row)[0] == "by length",
        lambda row: parts(row)[0] == "lambda 1",
    ),
    "values with lambda by length, against a group's mean": (
        lambda row: parts(row)[0] == "by length",
        lambda row: parts(row)[0] == "group",
    ),
}


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    rows = json.loads(path.read_text(encoding="utf-8"))
    seeds = sorted({row["seed"] for row in rows})
    print(f"| with, against without | {' | '.join(FIGURES)} |\n|---|{'---|' * len(FIGURES)}")
    for name, (has, lacks) in CONTRASTS.items():
        cells = []
        for figure in FIGURES.values():
            differences = []
            for seed in seeds:
                of_seed = [row for row in rows if row["seed"] == seed]
                with_it = statistics.fmean(figure(row) for row in of_seed if has(row))
                without = statistics.fmean(figure(row) for row in of_seed if lacks(row))
                differences.append(with_it - without)
            each = ", ".join(f"{value:+.1f}" for value in differences)
            cells.append(f"{mean_and_interval(differences, signed=True)} ({each})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
