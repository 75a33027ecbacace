"""Critics side by side: the table and the figure of `vapo critics`."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from vapo.sweep.report.style import house_style, line_styles
from vapo.system.table_text import csv_cell, markdown_cell, markdown_text

NEARLY = 0.9


@dataclass(frozen=True)
class Curve:
    """A critic's held-out explained variance with one seed, before training first.

    `points` are (optimizer step, response tokens, seconds of training, explained variance).
    """

    critic: str
    seed: int
    points: tuple[tuple[int, int, float, float], ...]
    oracle: float | None = None


@dataclass(frozen=True)
class Summary:
    """Means over the seeds; `spread` is the sample standard deviation, None with one seed.

    `best` is the largest value of the mean curve, `best_step` and `best_tokens` where it is, and
    `nearly_tokens` where the mean curve first reaches 90 % of it (None where it is not above 0).
    `relative_speed` is the tokens/s over those of the reference.
    """

    critic: str
    num_seeds: int
    last: float
    last_spread: float | None
    best: float
    best_spread: float | None
    best_step: int
    best_tokens: int
    nearly_tokens: int | None
    seconds: float
    tokens_per_s: float
    relative_speed: float
    oracle: float | None


def summarize(curves: Sequence[Curve], *, reference: str) -> list[Summary]:
    """One summary a critic, in the curves' order; the reference is the scalar head's row."""
    by_critic: dict[str, list[Curve]] = {}
    for curve in curves:
        by_critic.setdefault(curve.critic, []).append(curve)
    speeds = {name: _speed(found) for name, found in by_critic.items()}
    return [_summary(name, found, speeds, reference) for name, found in by_critic.items()]


def _speed(curves: Sequence[Curve]) -> float:
    seconds = sum(curve.points[-1][2] for curve in curves)
    return sum(curve.points[-1][1] for curve in curves) / seconds if seconds else 0.0


def _summary(
    name: str, curves: Sequence[Curve], speeds: Mapping[str, float], reference: str
) -> Summary:
    columns = list(zip(*(curve.points for curve in curves), strict=True))
    _, means, spreads = zip(*mean_curves(curves)[name], strict=True)
    tokens = [round(statistics.fmean(point[1] for point in column)) for column in columns]
    best = max(range(len(means)), key=means.__getitem__)
    nearly = (i for i, mean in enumerate(means) if mean >= NEARLY * means[best])
    oracles = [curve.oracle for curve in curves if curve.oracle is not None]
    speed = speeds.get(reference, 0.0)
    return Summary(
        critic=name,
        num_seeds=len(curves),
        last=means[-1],
        last_spread=spreads[-1],
        best=means[best],
        best_spread=spreads[best],
        best_step=columns[best][0][0],
        best_tokens=tokens[best],
        nearly_tokens=tokens[next(nearly)] if means[best] > 0 else None,
        seconds=statistics.fmean(curve.points[-1][2] for curve in curves),
        tokens_per_s=speeds[name],
        relative_speed=speeds[name] / speed if speed else 0.0,
        oracle=statistics.fmean(oracles) if oracles else None,
    )


def mean_curves(curves: Sequence[Curve]) -> dict[str, list[tuple[int, float, float | None]]]:
    """Critic -> (optimizer step, mean over the seeds, standard deviation) of each measurement."""
    means: dict[str, list[tuple[int, float, float | None]]] = {}
    for name in dict.fromkeys(curve.critic for curve in curves):
        found = [curve.points for curve in curves if curve.critic == name]
        for column in zip(*found, strict=True):
            values = [point[3] for point in column]
            spread = statistics.stdev(values) if len(values) > 1 else None
            point = (column[0][0], statistics.fmean(values), spread)
            means.setdefault(name, []).append(point)
    return means


def markdown(table: Sequence[Summary], *, reference: str) -> str:
    """The table, the oracle's row, and a line that says which critic knows most."""
    lines = [
        "| critic | seeds | held-out explained variance, last | best | at step | tokens until 90 % "
        f"of best | s | tokens/s, {markdown_cell(reference)} = 1 |",
        "|---|" + "---:|" * 7,
    ]
    for row in table:
        nearly = "" if row.nearly_tokens is None else f"{row.nearly_tokens:,}"
        lines.append(
            f"| {markdown_cell(row.critic)} | {row.num_seeds} | "
            f"{_shown(row.last, row.last_spread)} | {_shown(row.best, row.best_spread)} | "
            f"{row.best_step} | {nearly} | {row.seconds:.1f} | {row.relative_speed:.2f} |"
        )
    oracle = table[0].oracle
    if oracle is not None:
        lines.append(f"| oracle | {table[0].num_seeds} | {oracle:.3f} | {oracle:.3f} | | | | |")
    return "\n".join([*lines, "", markdown_text(_who_knows_most(table))]) + "\n"


def _who_knows_most(table: Sequence[Summary]) -> str:
    """Of the critics with several seeds: the spread between seeds decides what is a difference."""
    bands = {row: (row.best, s) for row in table if (s := row.best_spread) is not None}
    if not bands:
        return "One seed does not tell the critics apart: give several, as --seeds 0,1,2."
    most = max(bands, key=lambda row: row.best)
    best, spread = bands.pop(most)
    among = "" if len(bands) + 1 == len(table) else " of those with several seeds"
    said = (
        f"{most.critic} knows most{among}: {_shown(best, spread)} after {most.best_tokens:,} "
        "response tokens"
    )
    if most.oracle is not None:
        said += f"; the oracle {most.oracle:.3f}"
    near = [row.critic for row, (mean, own) in bands.items() if mean + own >= best - spread]
    if near:
        said += f". Within one standard deviation of it: {', '.join(near)}"
    return f"{said}."


def _shown(mean: float, spread: float | None) -> str:
    return f"{mean:.3f}" if spread is None else f"{mean:.3f} ± {spread:.3f}"


def as_csv(table: Sequence[Summary]) -> str:
    """Numbers, unrounded; empty where there is none."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(Summary.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    for row in table:
        writer.writerow({name: csv_cell(value) for name, value in vars(row).items()})
    return stream.getvalue()


def figure(curves: Sequence[Curve], *, reference: str) -> Figure:
    """Held-out explained variance against optimizer steps: a line a critic, the mean of its
    seeds, with a band of one standard deviation where there are several; the oracle's dashed.
    Close it when written."""
    means = mean_curves(curves)
    styles = line_styles(list(means), reference if reference in means else None)
    with house_style():
        drawn, axes = pyplot.subplots(figsize=(7.1, 3.6), layout="constrained")
        for name, points in means.items():
            steps, values = (np.array([point[i] for point in points]) for i in (0, 1))
            axes.plot(steps, values, label=name, **styles[name])
            spreads = np.array([spread for *_, spread in points if spread is not None])
            if len(spreads):
                shade = {"color": styles[name]["color"], "alpha": 0.12, "linewidth": 0}
                axes.fill_between(steps, values - spreads, values + spreads, **shade)
        oracles = [curve.oracle for curve in curves if curve.oracle is not None]
        if oracles:
            mean = statistics.fmean(oracles)
            axes.axhline(mean, color="#666666", linestyle="--", linewidth=1, label="oracle")
        later = [p[3] for curve in curves for p in curve.points[len(curve.points) // 4 :]]
        lowest = min(later)  # a loaded head may begin far below
        axes.set_ylim(bottom=max(min(lowest - 0.05, -0.05), -0.5))
        axes.set_xlabel("optimizer steps of the critic")
        axes.set_ylabel("held-out explained variance")
        drawn.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=3.6)
    return drawn
