"""Draws what critics know against the number of rollouts that they were trained on.

    python experiments/smollm2/draw_curve.py experiments/smollm2/critic_curve.json OUTPUT.png

A line is the mean of a critic's runs, a dot one of them, after the last pass of each row or on the
way through its first one; dashed is the oracle of the task's hidden states.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

PANELS = {
    "explained_variance": "explained variance of the returns",
    "within": "of the oracle's values within responses",
    "mistakes_named": "first wrong step named",
}
STARTS = {"reward_model": ", from a reward model", "truth": ", taught by continuations"}


def name_of(row: dict[str, Any]) -> str:
    is_whole = "critic.layers=null" in row["overrides"]
    network = "whole network, tokens alone" if is_whole else "two layers and log-probs"
    return network + STARTS.get(row["critic"], "")


def points_of(row: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of rollouts and the point after the last pass, and during the first pass."""
    *earlier_points, last = row["points"]
    yield row["num_rollouts"], last
    for point in earlier_points:
        if point["passes"] == 0 and point.get("rollouts_seen", 0) > 0:
            yield point["rollouts_seen"], point


def draw(rows: list[dict[str, Any]]) -> Figure:
    critics = list(dict.fromkeys(map(name_of, rows)))
    passes = " or ".join(map(str, sorted({row["num_passes"] for row in rows})))
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for index, critic in enumerate(critics):
            colour = f"C{index}"
            values_by_number: dict[int, list[float]] = defaultdict(list)
            for row in rows:
                if name_of(row) == critic:
                    for number, point in points_of(row):
                        if point[key] is not None:
                            values_by_number[number].append(point[key])
            numbers = sorted(values_by_number)
            means = [fmean(values_by_number[number]) for number in numbers]
            axes.plot(numbers, means, color=colour, label=critic)
            for number in numbers:
                axes.plot(
                    [number] * len(values_by_number[number]),
                    values_by_number[number],
                    ".",
                    color=colour,
                )
        axes.axhline(rows[0]["oracle"][key], color="grey", linestyle="--", label="oracle")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["num_rollouts"] for row in rows}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(-0.1, 1.05)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(f"rollouts, passes: {passes}")
    figure.axes[0].legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("curve", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.curve.read_text(encoding="utf-8"))).savefig(options.output, dpi=120)


if __name__ == "__main__":
    main()
