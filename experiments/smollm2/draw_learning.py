"""Draws how fast systems learn: accuracy on fresh prompts against sampled responses.

    python experiments/smollm2/draw_learning.py experiments/smollm2/results_group_sizes_cpu.json \
        docs/images/learning_of_a_language_model.png

A thick line is the mean over a system's seeds, a thin line one seed. Each point is the accuracy of
four training batches, which are scored before they are trained on. The dotted line is the score of
the first policy on held-out prompts. Systems with fewer than `MIN_SEEDS` seeds are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vapo.sweep.report.style import house_style, line_styles

MIN_SEEDS = 3
BATCHES = 4  # a point
RESPONSES = 64  # a batch


def points(row: Mapping[str, Any]) -> np.ndarray:
    """The accuracy in per cent of each four batches of a run."""
    accuracy = np.array(row["accuracy"])
    return 100 * accuracy.reshape(-1, BATCHES).mean(axis=1)


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    by_system: dict[str, list[np.ndarray]] = {}
    for row in rows:
        by_system.setdefault(row["system"], []).append(points(row))
    systems = [name for name, runs in by_system.items() if len(runs) >= MIN_SEEDS]
    styles = line_styles(systems, None)
    with house_style():
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for name in systems:
            runs = np.array(by_system[name])
            responses = RESPONSES * (BATCHES * np.arange(runs.shape[1]) + BATCHES / 2)
            for run in runs:
                axes.plot(responses, run, color=styles[name]["color"], alpha=0.3, linewidth=0.7)
            axes.plot(
                responses, runs.mean(axis=0), label=f"{name} ({len(runs)} seeds)", **styles[name]
            )
        before = 100 * float(np.mean([row["before"] for row in rows]))
        axes.axhline(before, color="grey", linestyle=":", label="first policy")
        axes.set_xlabel("sampled responses")
        axes.set_ylabel("right on fresh prompts, %")
        axes.legend(frameon=False, loc="lower right")
    return figure


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text(encoding="utf-8"))).savefig(target)
