"""The look of the figures, which are meant for print, in colour or in grey.

Colours are Okabe and Ito's, distinguishable with any colour vision; dashes and markers tell the
lines apart without colour. The full system is black, solid and thicker in every figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.rcsetup import cycler

matplotlib.use("Agg")  # before pyplot: a report needs no display

from matplotlib import pyplot

FULL_SYSTEM = {"color": "#000000", "linestyle": "-", "marker": "", "linewidth": 1.9, "zorder": 5}
_STYLES = cycler(
    color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D1F"],
    linestyle=[(0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), "-",
               (0, (3, 1.2, 1, 1.2, 1, 1.2)), (0, (8, 2)), (0, (2, 2)), "-"],
    marker=["o", "s", "^", "D", "v", "P", "X", "*"],
)  # fmt: skip
_RC = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.6,
    "figure.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "vapo",
}


def house_style() -> AbstractContextManager[None]:
    return pyplot.rc_context(_RC)


def line_styles(rows: Sequence[str], full_system: str | None) -> dict[str, dict[str, Any]]:
    """Return row -> keyword arguments of `plot`, which are equal in all figures of these rows."""
    other_rows = [row for row in rows if row != full_system]
    styles = {row: dict(style) for row, style in zip(other_rows, cycle(_STYLES), strict=False)}
    return styles | {row: dict(FULL_SYSTEM) for row in rows if row == full_system}
