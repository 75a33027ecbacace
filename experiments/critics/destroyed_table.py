"""Table and figure of the destroyed critics, from the runs that `destroyed.py` recorded.

Differences are taken within a seed, whose runs share the pretrained critic, the prompts and the
random numbers. Intervals (95 %, Student's t) are over seeds; there is none of a single seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vapo.sweep.report.estimates import MeanOfSeeds, estimate_over_seeds
from vapo.sweep.report.tables import markdown_table

OUTPUT = Path(__file__).parent / "destroyed/results.json"
SCORES = {"after": "held out", "fresh": "fresh prompts"}
BASELINES = {"critic": "the critic's values", "trusted": "trusted"}
CONTROL = ("", "")
Row = Mapping[str, Any]


def read_rows(output: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (
        json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
    )
    return rows


def estimate(values: Sequence[float]) -> MeanOfSeeds:
    """The mean over seeds, with an interval if there are several, also where some collapse."""
    return estimate_over_seeds(values) if len(values) > 1 else MeanOfSeeds(values[0])


def half_width(value: MeanOfSeeds) -> float:
    """Half the width of its interval; 0 for a single seed."""
    return 0.0 if value.interval is None else (value.interval[1] - value.interval[0]) / 2


def by_seed(rows: Iterable[Row], task: str, case: tuple[str, str], score: str) -> dict[int, float]:
    """The score of each seed in per cent."""
    return {
        row["seed"]: 100 * row[score]
        for row in rows
        if row["task"] == task and (row["values"], row["baseline"]) == case
    }


def difference(rows: Iterable[Row], task: str, case: tuple[str, str], score: str) -> list[float]:
    """The score's difference to the loss without a critic (lambda 1), of seeds that have both."""
    rows = list(rows)
    control = by_seed(rows, task, CONTROL, score)
    case_scores = by_seed(rows, task, case, score)
    return [
        case_scores[seed] - control[seed] for seed in sorted(case_scores.keys() & control.keys())
    ]


def kinds(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["values"] for row in rows if row["values"]))


def table(rows: Sequence[Row]) -> str:
    """One part for each task, in points of avg@k; seeds in brackets."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        lines = []
        cases = [CONTROL, *((kind, name) for kind in kinds(rows) for name in BASELINES)]
        for case in cases:
            cells = [case[0] or "none", BASELINES.get(case[1], "the others' mean, lambda 1")]
            for score in SCORES:
                case_scores = by_seed(rows, task, case, score)
                each = ", ".join(f"{case_scores[seed]:.1f}" for seed in sorted(case_scores))
                differences = difference(rows, task, case, score)
                cells.append(
                    f"{statistics.fmean(case_scores.values()):.1f} ({each})" if case_scores else ""
                )
                is_shown = differences and case != CONTROL
                cells.append(estimate(differences).text("+") if is_shown else "")
            if any(cells[2:]):
                lines.append(cells)
        titles = ["values", "baseline", "held out", "difference", "fresh prompts", "difference"]
        parts.append(f"**{task[0].upper()}{task[1:]}**\n\n{markdown_table(titles, lines)}")
    return "\n\n".join(parts) + "\n"


def draw(rows: Sequence[Row], path: Path, *, score: str = "fresh") -> None:
    """One panel for each task: the loss without a critic is the line at 0."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = kinds(rows)
    figure = Figure(figsize=(1.5 + 3.2 * len(tasks), 3.6), layout="constrained")
    axes = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axis, task in zip(axes, tasks, strict=True):
        axis.axvline(0, color="black", linewidth=0.8)
        for (name, label), color, shift in zip(
            BASELINES.items(), ("tab:red", "tab:blue"), (-0.14, 0.14), strict=True
        ):
            by_case = {
                place: estimate(differences)
                for place, kind in enumerate(names)
                if (differences := difference(rows, task, (kind, name), score))
            }
            axis.errorbar(
                [interval.mean for interval in by_case.values()],
                [place + shift for place in by_case],
                xerr=[half_width(interval) for interval in by_case.values()],
                fmt="o",
                color=color,
                label=label,
                capsize=3,
            )
        axis.set_xscale("symlog", linthresh=5)
        ticks = (-50, -20, -10, -5, 0, 5)
        axis.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_title(task)
        axis.set_xlabel(f"points ahead of no critic\n{SCORES[score]}")
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=150)


def write_report(output: Path) -> str:
    """Write table and figure beside the runs' file; return the table."""
    rows = read_rows(output)
    if not rows:
        return f"{output} has no runs yet"
    lines = table(rows)
    (output.parent / "table.md").write_text(lines, encoding="utf-8")
    draw(rows, output.parent / "destroyed.png")
    return lines
