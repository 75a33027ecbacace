"""Draw the figures: training curves, value pretraining, and diagnostics by token position."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from textwrap import wrap
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vapo.sweep.grid import GridRow
from vapo.sweep.report.rows import SCORE
from vapo.sweep.report.run_records import PANELS, RunRecord
from vapo.sweep.report.runs import Collection
from vapo.sweep.report.style import house_style, line_styles

Points = Mapping[float, float]
"""x -> y, of one run."""
Band = Mapping[float, Sequence[float]]
"""x -> the values of a row's seeds there."""
_WIDTH = 7.1  # inches: a page's text
_MAX_LINES = 9
_LEGEND_CHARS = {4: 18, 3: 32, 2: 50, 1: 100}
"""A number of legend columns -> the most characters of a label in each."""
_WHEN = ("first", "last")
_PRETRAINING_PANELS = {
    "critic/value_loss": "value loss",
    "critic/explained_variance": "explained variance\nof each batch",
}
_POSITION_PANELS = {
    "value_mean": "mean value",
    "advantage_mean": "mean advantage\n(before whitening)",
    "reward_weight_mean": "weight of the final\nreward, $\\lambda^{T-t}$",
}


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption; `name` is the name of its files without a suffix."""

    name: str
    caption: str
    figure: Figure


def draw_all(collection: Collection) -> Iterator[Drawing]:
    """Yield every figure for which the runs have data. The caller must close each after use."""
    runs, full_system = collection.runs, collection.full_system
    with house_style():
        for suffix, about, rows in row_groups(collection):
            num_seeds = max(sum(run.row == row for run in runs) for row in rows)
            note = f"Lines: means of up to {num_seeds} seeds; shade: lowest to highest."
            about += f". {note}" if num_seeds > 1 else ". "
            if figure := curves(runs, rows, PANELS, full_system):
                caption = (
                    "Score, response length, reward, entropy, explained variance of the critic "
                    "in each batch and upper clip fraction against optimizer steps of the policy, "
                    f"value pretraining left out{about}"
                )
                yield Drawing(f"training_curves{suffix}", caption, figure)
            if figure := position_figure(runs, rows, full_system):
                caption = (
                    "Mean value, mean advantage (before whitening) and weight of the final reward "
                    f"against token position, at the first and the last policy iteration{about}"
                )
                yield Drawing(f"positions{suffix}", caption, figure)
        runs = [*collection.pretrainings, *runs]
        rows = list(dict.fromkeys(run.row for run in runs))
        if figure := curves(runs, rows, _PRETRAINING_PANELS, pretraining=True):
            caption = (
                "Value pretraining: loss and explained variance of each batch, against Monte-Carlo "
                "returns."
            )
            yield Drawing("value_pretraining", caption, figure)


def row_groups(collection: Collection) -> Iterator[tuple[str, str, list[str]]]:
    """Yield groups of rows, so that no figure has more lines than a reader can distinguish.

    A group is (suffix for the figure's name, words for its caption, names of rows). The ablation's
    systems and its rows without a component are in different groups. The full system is in each.
    """
    rows_with_runs = {run.row for run in collection.runs}
    rows = [row for row in collection.rows if row.name in rows_with_runs]
    full = [row.name for row in rows if row.name == collection.full_system]
    other_rows = [row for row in rows if row.name not in full]
    parts: list[tuple[str, str, list[GridRow]]] = [
        ("_systems", "; systems", [row for row in other_rows if not row.component_off]),
        ("_components", "; without a component", [row for row in other_rows if row.component_off]),
    ]
    if len(rows) <= _MAX_LINES and not all(group for *_, group in parts):
        parts = [("", "", other_rows)]
    for suffix, about, group in parts:
        limit = _MAX_LINES - len(full)
        for start in range(0, len(group), limit):
            number = f"_{start // limit + 1}" if len(group) > limit else ""
            part = [row.name for row in group[start : start + limit]]
            yield suffix + number, about, part + full
    if not other_rows and full:
        yield "", "", full


def _panels(num_panels: int, height: float, rows: Sequence[str], **share: Any) -> Any:
    """Return a figure with two panels in each line, and the array of its axes.

    Args:
        height: the panels' height in inches.
        rows: the labels of the legend, which needs room.
        share: options for shared axes, as `sharex`.
    """
    lines, size = -(-num_panels // 2), (_WIDTH, height + legend_height(rows))
    return pyplot.subplots(lines, 2, figsize=size, squeeze=False, layout="constrained", **share)


def curves(
    runs: Sequence[RunRecord],
    rows: Sequence[str],
    panels: Mapping[str, str],
    full_system: str | None = None,
    *,
    pretraining: bool = False,
) -> Figure | None:
    """Draw metrics against policy steps, or against iterations of value pretraining.

    The result is None if no run has any of the metrics.

    Args:
        rows: the names of the rows to draw.
        panels: metric -> title.
        full_system: the row that is drawn in black.
        pretraining: whether to draw value pretraining instead of the policy's training.
    """
    points = partial(points_of, pretraining=pretraining)
    bands = {key: row_bands(runs, rows, partial(points, key=key)) for key in panels}
    bands = {key: row_values for key, row_values in bands.items() if row_values}
    if not bands:
        return None
    rows = [row for row in rows if any(row in row_values for row_values in bands.values())][
        :_MAX_LINES
    ]
    styles = line_styles(rows, full_system)
    figure, axes = _panels(len(bands), 2.2 * -(-len(bands) // 2) + 0.2, rows, sharex=True)
    for axis, (key, row_values) in zip(axes.flat, bands.items(), strict=False):
        draw_bands(axis, {row: row_values[row] for row in rows if row in row_values}, styles)
        axis.set_ylabel(panels[key])
        if pretraining and key == "critic/explained_variance":
            _draw_zero(axis)
    for axis in axes.flat[len(bands) :]:
        axis.set_axis_off()
    for axis in axes.flat[max(0, len(bands) - 2) : len(bands)]:
        axis.set_xlabel(
            "iterations of value pretraining" if pretraining else "optimizer steps of the policy"
        )
        axis.tick_params(labelbottom=True)
    add_legend(figure, styles, bands.values())
    return figure


def position_figure(
    runs: Sequence[RunRecord], rows: Sequence[str], full_system: str | None
) -> Figure | None:
    """Draw means by token position, at the first policy iteration (left) and at the last (right).

    They are values, advantages and the final reward's weight. The result is None if no run has
    them.
    """
    styles = line_styles(rows, full_system)
    data = {
        (column, when): row_bands(runs, rows, partial(position_points, when=when, column=column))
        for column in _POSITION_PANELS
        for when in _WHEN
    }
    columns = [key for key in _POSITION_PANELS if any(data[key, when] for when in _WHEN)]
    if not columns:
        return None
    height = 1.9 * len(columns) + 0.5
    figure, axes = _panels(2 * len(columns), height, rows, sharex="col", sharey="row")
    for line, column in zip(axes, columns, strict=True):
        for axis, when in zip(line, _WHEN, strict=True):
            draw_bands(axis, data[column, when], styles)
            if column != "reward_weight_mean":
                _draw_zero(axis)
        line[0].set_ylabel(_POSITION_PANELS[column])
        if column == "reward_weight_mean":
            line[0].set_ylim(-0.04, 1.04)
    for first, last, when in zip(axes[0], axes[-1], _WHEN, strict=True):
        first.set_title(f"{when} policy iteration")
        last.set_xlabel("token position in the response")
    add_legend(figure, styles, data.values())
    return figure


def _draw_zero(axis: Axes) -> None:
    axis.axhline(0, color="#888888", linewidth=0.6, zorder=1)


def draw_bands(
    axis: Axes, bands: Mapping[str, Band], styles: Mapping[str, Mapping[str, Any]]
) -> None:
    """Draw a line for each row, the mean of its seeds, and a shade from lowest to highest."""
    for row, band in bands.items():
        x, color = list(band), styles[row]["color"]
        mean, low, high = (
            [reduce(values) for values in band.values()] for reduce in (fmean, min, max)
        )
        axis.plot(x, mean, markevery=max(1, len(x) // 8), **styles[row])
        if len(band[x[0]]) > 1:
            shade = min(0.15, 0.35 / len(bands))  # lighter for many: they overlap
            axis.fill_between(x, low, high, color=color, alpha=shade, lw=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))


def add_legend(figure: Figure, styles: Mapping[str, Mapping[str, Any]], panel_bands: Any) -> None:
    """Add one legend below the panels, with the rows that any panel has.

    Args:
        panel_bands: for each panel, row -> band.
    """
    present = [row for row in styles if any(row in bands for bands in panel_bands)]
    labels = [wrapped_label(row) for row in present]
    handles = [
        pyplot.Line2D([], [], label=label, **styles[row])
        for row, label in zip(present, labels, strict=True)
    ]
    columns, where = min(legend_columns(present), len(handles)), "outside lower center"
    figure.legend(handles=handles, loc=where, ncols=columns, frameon=False, handlelength=3.6)


def legend_columns(labels: Sequence[str]) -> int:
    """Return the number of legend columns that fit the page's width."""
    longest = max(map(len, labels), default=0)
    return next((n for n, num_chars in _LEGEND_CHARS.items() if longest <= num_chars), 1)


def wrapped_label(label: str) -> str:
    """Return a label in lines that fit the page's width in a legend of one column."""
    return "\n".join(wrap(label, _LEGEND_CHARS[1])) or label


def legend_height(labels: Sequence[str]) -> float:
    """Return the legend's height in inches, to be added to the panels' height."""
    num_lines = sum(wrapped_label(label).count("\n") + 1 for label in labels)
    return 0.16 * -(-num_lines // legend_columns(labels))


def points_of(run: RunRecord, key: str, *, pretraining: bool = False) -> Points:
    """Return a run's metric against policy steps, or against iterations of value pretraining.

    The score is in per cent. Iterations of value pretraining count from 1. The axis of policy steps
    leaves them out. A policy step x is the number of updates of the policy that a value belongs to.
    An iteration's rollouts belong to the policy before its update, an evaluation to the policy
    after it. Values logged at every step, such as the entropy, are averaged over the iteration and
    stand at its beginning.

    Args:
        key: the metric's name.
    """
    values, steps, phase = (
        run.history.get(name, {}) for name in (key, "progress/policy_steps", "progress/phase")
    )
    if key == SCORE:
        return {steps.get(step, 0.0): 100 * value for step, value in sorted(values.items())}
    points: dict[float, float] = {}
    previous_step, number = -sys.maxsize, 0  # value pretraining has steps below 0
    for step in sorted(phase):
        if bool(phase[step]) != pretraining:
            number += 1
            if inside := [v for at, v in values.items() if previous_step < at <= step and v == v]:
                points[number if pretraining else steps.get(previous_step, 0.0)] = fmean(inside)
        previous_step = step
    return points


def row_bands(
    runs: Sequence[RunRecord], rows: Sequence[str], points: Callable[[RunRecord], Points]
) -> dict[str, Band]:
    """Return row -> its band, for each row that has points.

    A band has each x that all seeds of the row have.

    Args:
        points: returns the points of a run, empty if it has none.
    """
    bands: dict[str, Band] = {}
    for row in rows:
        seed_points = [seed for run in runs if run.row == row and (seed := points(run))]
        if seed_points and (shared := set.intersection(*map(set, seed_points))):
            bands[row] = {x: [seed[x] for seed in seed_points] for x in sorted(shared)}
    return bands


def position_points(run: RunRecord, when: str, column: str) -> Points:
    """Return position -> a column of the position diagnostics, of one policy iteration.

    Positions with fewer than 5 % of the tokens of the first position are left out. The result is {}
    if the run has no such column.

    Args:
        when: "first" or "last" policy iteration.
    """
    tables = [table for table in run.positions if table["phase"] == "policy_optimization"]
    tables.sort(key=lambda table: int(table["iteration"]))
    columns = tables[0 if when == "first" else -1]["columns"] if tables else {}
    if column not in columns:
        return {}
    parts = zip(columns["position"], columns[column], columns["num_tokens"], strict=True)
    enough = 0.05 * columns["num_tokens"][0]
    return {position: value for position, value, count in parts if count >= enough}
