"""Write the table and draw the figure of `vapo critics`, which compare critics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from vapo.sweep.report.style import house_style, line_styles
from vapo.sweep.report.tables import (
    csv_cell,
    csv_text,
    markdown_cell,
    markdown_table,
    markdown_text,
)

NEARLY = 0.9  # share of the best explained variance


@dataclass(frozen=True)
class Curve:
    """A critic's held-out explained variance during training with one seed.

    Attributes:
        points: (optimizer step, response tokens, seconds of training, explained variance) of each
            measurement. The first is before training.
        oracle: the explained variance of the true values; None if they are not known.
    """

    critic: str
    seed: int
    points: tuple[tuple[int, int, float, float], ...]
    oracle: float | None = None


@dataclass(frozen=True)
class Summary:
    """One critic's results, as means over its seeds: a row of the table.

    Attributes:
        last, best: explained variance at the end of the mean curve, and at its maximum.
        last_spread, best_spread: standard deviations over the seeds at the end and at the maximum;
            None with one seed.
        best_step, best_tokens: the optimizer step and the response tokens at the maximum.
        nearly_tokens: the response tokens when the mean curve first reaches 90 % of `best`; None if
            `best` is not above 0.
        seconds: the time of training.
        relative_speed: `tokens_per_s` divided by the reference critic's.
        oracle: the explained variance of the true values; None if they are not known.
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
    """Return one summary for each critic, in the order in which critics first occur in the curves.

    Args:
        reference: the name of the critic whose speed counts as 1.
    """
    by_critic: dict[str, list[Curve]] = {}
    for curve in curves:
        by_critic.setdefault(curve.critic, []).append(curve)
    speeds = {name: _speed(group) for name, group in by_critic.items()}
    return [_summary(name, group, speeds, reference) for name, group in by_critic.items()]


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
    """Return critic -> [(optimizer step, mean over the seeds, standard deviation), ...].

    There is one entry for each measurement. The standard deviation is None with one seed.
    """
    means: dict[str, list[tuple[int, float, float | None]]] = {}
    for name in dict.fromkeys(curve.critic for curve in curves):
        seed_points = [curve.points for curve in curves if curve.critic == name]
        for column in zip(*seed_points, strict=True):
            values = [point[3] for point in column]
            spread = statistics.stdev(values) if len(values) > 1 else None
            point = (column[0][0], statistics.fmean(values), spread)
            means.setdefault(name, []).append(point)
    return means


def markdown(table: Sequence[Summary], *, reference: str) -> str:
    """Return the table as Markdown, with a last line that names the best critic.

    If the true values are known, the oracle has a row.

    Args:
        reference: the name of the critic whose speed counts as 1.
    """
    titles = ["critic", "seeds", "held-out explained variance, last", "best", "at step"]
    titles += ["tokens until 90 % of best", "s", f"tokens/s, {markdown_cell(reference)} = 1"]
    rows = [
        [
            *(markdown_cell(row.critic), str(row.num_seeds)),
            *(_shown(row.last, row.last_spread), _shown(row.best, row.best_spread)),
            *(str(row.best_step), "" if row.nearly_tokens is None else f"{row.nearly_tokens:,}"),
            *(f"{row.seconds:.1f}", f"{row.relative_speed:.2f}"),
        ]
        for row in table
    ]
    if (oracle := table[0].oracle) is not None:
        rows.append(["oracle", str(table[0].num_seeds), *[f"{oracle:.3f}"] * 2, *[""] * 4])
    lines = markdown_table(titles, rows, align="lr")
    return "\n".join([lines, "", markdown_text(_conclusion(table))]) + "\n"


def _conclusion(table: Sequence[Summary]) -> str:
    """Return a sentence on which critic explains most, and which ones are within its seeds' spread.

    Critics with one seed have no spread and are left out.
    """
    bands = {row: (row.best, s) for row in table if (s := row.best_spread) is not None}
    if not bands:
        return "One seed does not tell the critics apart: give several, as --seeds 0,1,2."
    winner = max(bands, key=lambda row: row.best)
    best, spread = bands.pop(winner)
    among = "" if len(bands) + 1 == len(table) else " of those with several seeds"
    text = (
        f"{winner.critic} knows most{among}: {_shown(best, spread)} after {winner.best_tokens:,} "
        "response tokens"
    )
    if winner.oracle is not None:
        text += f"; the oracle {winner.oracle:.3f}"
    near = [row.critic for row, (mean, sd) in bands.items() if mean + sd >= best - spread]
    if near:
        text += f". Within one standard deviation of it: {', '.join(near)}"
    return f"{text}."


def _shown(mean: float, spread: float | None) -> str:
    return f"{mean:.3f}" if spread is None else f"{mean:.3f} ± {spread:.3f}"


def as_csv(table: Sequence[Summary]) -> str:
    """Return the summaries as CSV. Numbers are not rounded, and None becomes an empty field."""
    names = list(Summary.__dataclass_fields__)
    return csv_text(names, [[csv_cell(getattr(row, name)) for name in names] for row in table])


def figure(curves: Sequence[Curve], *, reference: str) -> Figure:
    """Draw held-out explained variance against optimizer steps.

    A critic's line is the mean of its seeds. With several seeds, a band around it shows one
    standard deviation. A dashed line shows the oracle. The caller must close the figure.

    Args:
        reference: the name of the critic that is drawn as the reference.
    """
    means = mean_curves(curves)
    styles = line_styles(list(means), reference if reference in means else None)
    with house_style():
        chart, axes = pyplot.subplots(figsize=(7.1, 3.6), layout="constrained")
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
        chart.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=3.6)
    return chart
