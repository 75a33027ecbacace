"""The picture of the map: where a critic is worth taking, measured and forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from run import GROUP_SIZES, SIZES

MOST = 12.0  # points, at which a colour is as dark as it gets


def _panel(
    axes: Axes, title: str, numbers: np.ndarray, texts: list[list[str]], clear: np.ndarray
) -> None:
    """A cell for each number of steps (longest on top) and group size; clear ones have a frame."""
    colours: dict[str, Any] = {"cmap": "RdBu", "vmin": -MOST, "vmax": MOST}
    axes.imshow(np.nan_to_num(numbers), origin="lower", aspect="auto", **colours)
    for row, column in np.ndindex(numbers.shape):
        is_dark = abs(np.nan_to_num(numbers[row, column])) > 0.65 * MOST
        axes.text(
            column, row, texts[row][column], ha="center", va="center", fontsize=9, linespacing=1.4,
            color="white" if is_dark else "black",
            fontweight="bold" if clear[row, column] else "normal",
        )  # fmt: skip
        if clear[row, column]:
            corner = (column - 0.47, row - 0.46)
            frame = Rectangle(corner, 0.94, 0.92, fill=False, edgecolor="black", linewidth=2)
            axes.add_patch(frame)
    axes.set_xticks(range(len(GROUP_SIZES)), [str(size) for size in GROUP_SIZES])
    axes.set_yticks(range(len(SIZES)), [str(size) for size in SIZES])
    axes.set_xlabel("responses to a prompt")
    axes.set_ylabel("steps of a response")
    axes.set_title(title, fontsize=11)
    axes.tick_params(length=0)


def draw(
    columns: Mapping[str, Mapping[tuple[int, int], Any]],
    forecast: Sequence[Mapping[str, Any]],
    path: Path,
) -> None:
    """Draw four panels: VAPO and trusted, the latter with its pretraining counted, the forecast."""
    titles = {
        "VAPO": "VAPO",
        "trusted": "trusted critic",
        "trusted, counted": "trusted critic, value pretraining counted",
    }
    figure, grid = plt.subplots(2, 2, figsize=(12, 9), constrained_layout=True)
    shape = (len(SIZES), len(GROUP_SIZES))
    for axes, (name, title) in zip(grid.flat, titles.items(), strict=False):
        numbers, clear = np.full(shape, np.nan), np.zeros(shape, bool)
        texts = [["" for _ in GROUP_SIZES] for _ in SIZES]
        for (size, group), difference in columns[name].items():
            row, column = SIZES.index(size), GROUP_SIZES.index(group)
            numbers[row, column], clear[row, column] = difference.mean, difference.is_clear
            low, high = difference.limits
            texts[row][column] = f"{difference.mean:+.1f}\n[{low:+.1f}, {high:+.1f}]"
        _panel(axes, f"{title}:\npoints ahead of the loss without a critic", numbers, texts, clear)
    numbers, texts = np.full(shape, np.nan), [["" for _ in GROUP_SIZES] for _ in SIZES]
    for forecast_row in forecast:
        if forecast_row["share_of_slip_rate"] != 1.0:
            continue
        row, column = (
            SIZES.index(forecast_row["steps"]),
            GROUP_SIZES.index(forecast_row["group_size"]),
        )
        samples = forecast_row["samples"]["trusted"]
        numbers[row, column] = -MOST * np.log2(samples)  # half as many: as dark as it gets
        texts[row][column] = f"x {samples:.2f}"
    _panel(
        grid.flat[3],
        "forecast, trusted critic (earlier formula):\nsamples needed for the same signal",
        numbers, texts, np.zeros(shape, bool),
    )  # fmt: skip
    title = "Take a critic where it is blue (framed: 0 is outside of the 95 % interval)"
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, dpi=110)
    plt.close(figure)
