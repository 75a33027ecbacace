"""The figures: training curves, value pretraining, and diagnostics by token position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vapo.sweep.report.curves import PANELS, Band, position_bands, row_bands
from vapo.sweep.report.runs import Collection, RowInfo
from vapo.sweep.report.style import house_style, line_styles

_WIDTH = 7.1  # inches: a page's text
_MAX_LINES = 9
_POSITION_PANELS = {
    "value_mean": "mean value",
    "advantage_mean": "mean advantage\n(before whitening)",
    "reward_weight_mean": "weight of the final\nreward, $\\lambda^{T-t}$",
}


@dataclass(frozen=True)
class Drawing:
    name: str
    caption: str
    figure: Figure


def draw_all(collection: Collection) -> Iterator[Drawing]:
    """Every figure that the runs have data for. Close each one when it is written."""
    with house_style():
        for suffix, about, rows in row_groups(collection):
            note = band_note(collection, rows)
            for name, caption, figure in (
                (
                    "training_curves",
                    "Score, response length, reward, entropy, explained variance of the critic "
                    "and upper clip fraction against optimizer steps of the policy, value "
                    f"pretraining left out{about}. {note}",
                    training_curves(collection, rows),
                ),
                (
                    "positions",
                    "Mean value, mean advantage (before whitening) and weight of the final reward "
                    "against token position, at the first and the last policy "
                    f"iteration{about}. {note}",
                    position_figure(collection, rows),
                ),
            ):
                if figure is not None:
                    yield Drawing(f"{name}{suffix}", caption, figure)
        figure = pretraining_figure(collection)
        if figure is not None:
            caption = "Value pretraining: loss, and explained variance against Monte-Carlo returns."
            yield Drawing("value_pretraining", caption, figure)


def row_groups(collection: Collection) -> Iterator[tuple[str, str, list[str]]]:
    """Suffix, words for the caption, rows: no figure has more lines than a reader can distinguish.

    The ablation's systems and its rows without a component are two groups; the full system is
    in each.
    """
    drawn = {run.row for run in collection.runs}
    rows = [row for row in collection.rows if row.name in drawn]
    full = [row for row in rows if row.name == collection.full_system]
    others = [row for row in rows if row not in full]
    parts: list[tuple[str, str, list[RowInfo]]] = [
        ("_systems", "; systems", [row for row in others if not row.component_off]),
        ("_components", "; without a component", [row for row in others if row.component_off]),
    ]
    if len(rows) <= _MAX_LINES and not all(chosen for *_, chosen in parts):
        parts = [("", "", others)]
    for suffix, about, chosen in parts:
        limit = _MAX_LINES - len(full)
        for start in range(0, len(chosen), limit):
            number = f"_{start // limit + 1}" if len(chosen) > limit else ""
            part = [*chosen[start : start + limit], *full]
            yield suffix + number, about, [row.name for row in part]
    if not others and full:
        yield "", "", [row.name for row in full]


def band_note(collection: Collection, rows: Sequence[str]) -> str:
    """What the shade is; nothing where every row has one seed."""
    most = max(len(collection.of_row(row)) for row in rows)
    return f"Lines: means of up to {most} seeds; shade: lowest to highest." if most > 1 else ""


def training_curves(collection: Collection, rows: Sequence[str]) -> Figure | None:
    """The paper's four plots, the critic's and the clip's, the systems overlaid."""
    styles = line_styles(rows, collection.full_system)
    bands = {key: row_bands(collection.runs, rows, key) for key in PANELS}
    if not any(bands.values()):
        return None
    keys = [key for key in PANELS if bands[key]]
    lines = -(-len(keys) // 2)
    figure, axes = pyplot.subplots(
        lines,
        2,
        figsize=(_WIDTH, 2.2 * lines + 0.2 + legend_height(rows)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, key in zip(axes.flat, keys, strict=False):
        draw_bands(axis, bands[key], styles)
        axis.set_ylabel(PANELS[key])
    for axis in axes.flat[len(keys) :]:
        axis.set_axis_off()
    for axis in axes.flat[max(0, len(keys) - 2) : len(keys)]:
        axis.set_xlabel("optimizer steps of the policy")
        axis.tick_params(labelbottom=True)
    add_legend(figure, styles, bands.values())
    return figure


def position_figure(collection: Collection, rows: Sequence[str]) -> Figure | None:
    """VC-PPO's diagnostics. Left: the first policy iteration, right: the last."""
    styles = line_styles(rows, collection.full_system)
    data = {
        (column, when): position_bands(collection.runs, rows, when, column)
        for column in _POSITION_PANELS
        for when in ("first", "last")
    }
    columns = [key for key in _POSITION_PANELS if data[key, "first"] or data[key, "last"]]
    if not columns:
        return None
    figure, axes = pyplot.subplots(
        len(columns),
        2,
        figsize=(_WIDTH, 1.9 * len(columns) + 0.5 + legend_height(rows)),
        sharex="col",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for line, column in zip(axes, columns, strict=True):
        for axis, when in zip(line, ("first", "last"), strict=True):
            draw_bands(axis, data[column, when], styles)
        line[0].set_ylabel(_POSITION_PANELS[column])
        if column == "reward_weight_mean":
            line[0].set_ylim(-0.04, 1.04)
        else:
            for axis in line:
                axis.axhline(0, color="#888888", linewidth=0.6, zorder=1)
    for axis, when in zip(axes[0], ("first", "last"), strict=True):
        axis.set_title(f"{when} policy iteration")
    for axis in axes[-1]:
        axis.set_xlabel("token position in the response")
    add_legend(figure, styles, data.values())
    return figure


def pretraining_figure(collection: Collection) -> Figure | None:
    """Value loss and explained variance against iterations of value pretraining."""
    runs = [*collection.pretrainings, *collection.runs]
    rows = list(dict.fromkeys(run.row for run in runs))
    panels = {"critic/value_loss": "value loss", "critic/explained_variance": "explained variance"}
    bands = {key: row_bands(runs, rows, key, pretraining=True) for key in panels}
    rows = [row for row in rows if any(row in found for found in bands.values())][:_MAX_LINES]
    if not rows:
        return None
    styles = line_styles(rows, None)
    figure, axes = pyplot.subplots(
        1, 2, figsize=(_WIDTH, 2.6 + legend_height(rows)), layout="constrained"
    )
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        draw_bands(axis, {row: one for row, one in bands[key].items() if row in rows}, styles)
        axis.set_ylabel(title)
        axis.set_xlabel("iterations of value pretraining")
    axes[1].axhline(0, color="#888888", linewidth=0.6, zorder=1)
    add_legend(figure, styles, bands.values())
    return figure


def draw_bands(
    axis: Axes, bands: Mapping[str, Band], styles: Mapping[str, Mapping[str, Any]]
) -> None:
    """Lines with about eight markers each; a shade where there are several seeds."""
    for row, one in bands.items():
        style = styles[row]
        axis.plot(one.x, one.mean, markevery=max(1, len(one.x) // 8), **style)
        if one.num_seeds > 1:
            shade = min(0.15, 0.35 / len(bands))  # several lie on top of each other
            axis.fill_between(one.x, one.low, one.high, color=style["color"], alpha=shade, lw=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))


def add_legend(figure: Figure, styles: Mapping[str, Mapping[str, Any]], drawn: Any) -> None:
    """One legend below the panels, of the rows that are in any of them."""
    present = [row for row in styles if any(row in bands for bands in drawn)]
    handles = [pyplot.Line2D([], [], label=row, **styles[row]) for row in present]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(legend_columns(present), len(handles)),
        frameon=False,
        handlelength=3.6,
    )


def legend_columns(labels: Sequence[str]) -> int:
    """As many as fit the page's width at the legend's size."""
    longest = max(map(len, labels), default=0)
    return 4 if longest <= 18 else 3 if longest <= 32 else 2


def legend_height(labels: Sequence[str]) -> float:
    """Inches, which the panels do not have to give up."""
    return 0.16 * -(-len(labels) // legend_columns(labels))
