"""The histogram of a policy's pass rates."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vapo.sweep.report.style import house_style


def draw_pass_rates(histogram: Sequence[int]) -> Figure:
    """Bars at 0/k, 1/k, ..., 1; the two that teach nothing by themselves are lighter."""
    k = len(histogram) - 1
    with house_style():
        figure = Figure(figsize=(3.5, 2.2))
        axes = figure.subplots()
        colours = ["#bbbbbb" if number in (0, k) else "#0072B2" for number in range(k + 1)]
        rates = [number / k for number in range(k + 1)]
        axes.bar(rates, histogram, width=0.8 / k, color=colours)
        axes.set_xlabel(f"share of {k} responses that are correct")
        axes.set_ylabel("prompts")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
    return figure
