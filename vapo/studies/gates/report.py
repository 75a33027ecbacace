"""Write what a setting can show: the table, the verdicts and the figure of `vapo gates`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vapo.studies.gates.rules import Gate, GateCurves, GateFigures
from vapo.sweep.report.style import house_style
from vapo.sweep.report.tables import markdown_cell, markdown_table, markdown_text

_WIDTH = 96
_GREY = "#666666"


def figure_rows(figures: GateFigures) -> list[tuple[str, str]]:
    """Return (name, value as text) of each figure."""
    variance_start, pretrained = figures.explained_variance_start, figures.value_pretrained
    return [
        ("mean reward of a response (going on)", f"{figures.mean_reward:.3f}"),
        ("mean response length", f"{figures.mean_length:.1f} tokens"),
        ("explained variance before value pretraining", f"{variance_start:.3f}"),
        ("explained variance after it", _explained_text(figures)),
        ("critic's value at the middle token, before", f"{figures.value_start:.3f}"),
        (
            "critic's value at the middle token, after",
            "value pretraining is off" if pretrained is None else f"{pretrained:.3f}",
        ),
        (
            "value of a guess at the middle token",
            str(figures.guess or "not measured: no --answer_now"),
        ),
        ("T_unlearn: the critic alone passes a guess's value", _unlearned_text(figures)),
        (
            "T_collapse: the policy alone halves its responses",
            _iterations_text(figures.collapsed_after, figures.num_iterations),
        ),
        ("reward's mean weight, first tokens, adaptive lambda", f"{figures.weight_adaptive:.2g}"),
        ("reward's mean weight, first tokens, constant lambda", f"{figures.weight_constant:.2g}"),
        ("horizon of the adaptive lambda", f"{figures.horizon_adaptive:.4g} tokens"),
        ("horizon of the constant lambda", f"{figures.horizon_constant:.4g} tokens"),
        ("tokens clipped above", f"{100 * figures.clip_fraction_high:.2f} %"),
        ("responses that are right", f"{100 * figures.share_right:.1f} %"),
        ("coefficient of variation of the lengths", f"{figures.length_variation:.2f}"),
        ("groups of a prompt seen before", f"{100 * figures.share_returned:.1f} %"),
        ("visits to a training prompt in the whole run", f"{figures.prompt_visits:.2f}"),
    ]


def _explained_text(figures: GateFigures) -> str:
    critic, best = figures.explained_variance_pretrained, figures.explained_variance_oracle
    text = "value pretraining is off" if critic is None else f"{critic:.3f}"
    if best is None:
        return f"{text} (no oracle)"
    if critic is None or best <= 0:
        return f"{text} (an oracle's: {best:.3f})"
    return f"{text}, {100 * critic / best:.0f} % of an oracle's {best:.3f}"


def _unlearned_text(figures: GateFigures) -> str:
    if figures.guess is None:
        return "not measured: no --answer_now"
    earliest, latest = map(figures.iterations_text, figures.unlearned_between)
    mean = _iterations_text(figures.unlearned_after, figures.num_iterations)
    return f"{mean} [{earliest}, {latest}]"


def _iterations_text(number: int | None, limit: int) -> str:
    return f"not within {limit} iterations" if number is None else f"{number} iterations"


def console_text(figures: GateFigures, gates: Sequence[Gate]) -> str:
    """Return the table of figures and the verdicts as text of at most 96 columns."""
    rows = figure_rows(figures)
    widest = max(len(name) for name, _ in rows)
    lines = [f"{name:<{widest}}  {value}" for name, value in rows]
    lines += ["", "what this setting can show"]
    name_width, word_width = max(len(g.component) for g in gates), len("cannot show")
    indent = " " * (name_width + word_width + 4)
    for gate in gates:
        start = f"{gate.component:<{name_width}}  {gate.word:<{word_width}}  "
        lines += textwrap.wrap(
            "; ".join(gate.reasons), _WIDTH, initial_indent=start, subsequent_indent=indent
        )
    return "\n".join(lines)


def markdown(figures: GateFigures, gates: Sequence[Gate], *, about: Sequence[str]) -> str:
    """Return verdicts and figures as a Markdown page that shows `gates.png` of the same folder.

    Args:
        about: lines on the run, each an item of the list at the top.
    """
    lines = [
        "# What this setting can show",
        "",
        *(f"- {markdown_text(line)}" for line in about),
        "",
    ]
    verdicts = [
        (gate.component, f"**{gate.word}**", markdown_cell("; ".join(gate.reasons)))
        for gate in gates
    ]
    lines += [markdown_table(["component", "verdict", "because"], verdicts), ""]
    lines += [markdown_table(["figure", "value"], figure_rows(figures)), ""]
    return "\n".join([*lines, "![The three curves](gates.png)"]) + "\n"


def figure(figures: GateFigures, curves: GateCurves) -> Figure:
    """Draw three curves by iteration. The caller must close the figure.

    They show what the critic learns in value pretraining, how fast it unlearns its start, and how
    fast the policy shortens its responses.
    """
    with house_style():
        drawing, (knowledge_axes, middle_axes, length_axes) = pyplot.subplots(
            1, 3, figsize=(9.6, 3.5), layout="constrained"
        )
        _draw_knowledge(knowledge_axes, figures, curves)
        _draw_middle(middle_axes, figures, curves)
        _draw_length(length_axes, figures, curves)
    return drawing


def _draw_knowledge(axes: Axes, figures: GateFigures, curves: GateCurves) -> None:
    critic, best = curves.explained_variance, figures.explained_variance_oracle
    axes.plot(range(len(critic)), critic, color="#0072B2", marker="o", label="critic")
    if best is not None:
        axes.axhline(best, color=_GREY, linestyle="--", linewidth=1, label="oracle")
    later = [*critic[1:], *([] if best is None else [best]), 0.1]
    floor = max(min(0.0, *critic), -0.5)  # a loaded head may begin far below 0
    axes.set_ylim(floor - 0.05, max(later) * 1.15)
    axes.set_title("what the critic knows")
    _finish(axes, "iterations of value pretraining", "held-out explained variance")


def _draw_middle(axes: Axes, figures: GateFigures, curves: GateCurves) -> None:
    learning, unlearning = curves.value_pretraining, curves.value_unlearning
    axes.plot(range(len(learning)), learning, color="#0072B2", label="value pretraining")
    if unlearning:
        iterations = range(len(unlearning))
        axes.plot(iterations, unlearning, color="#D55E00", marker="o", label="the critic alone")
    axes.axhline(figures.mean_reward, color="#009E73", linestyle="--", label="going on")
    if figures.guess is not None:
        axes.axhline(figures.guess.mean, color=_GREY, linestyle=":", label="a guess")
        if math.isfinite(figures.guess.low):
            axes.axhspan(figures.guess.low, figures.guess.high, color=_GREY, alpha=0.15, lw=0)
        _mark(axes, figures.unlearned_after, "T_unlearn")
    axes.set_title("value of a half-finished response")
    _finish(axes, "iterations", "critic's value at the middle token")


def _draw_length(axes: Axes, figures: GateFigures, curves: GateCurves) -> None:
    lengths = curves.response_length
    axes.plot(range(len(lengths)), lengths, color="#D55E00", marker="o", label="the policy alone")
    axes.axhline(figures.start_length / 2, color=_GREY, linestyle=":", label="half of the start")
    _mark(axes, figures.collapsed_after, "T_collapse")
    axes.set_ylim(bottom=0, top=1.25 * max(lengths))
    axes.set_title("responses, the critic left as it is")
    _finish(axes, "iterations of the policy", "mean response length, tokens")


def _finish(axes: Axes, xlabel: str, ylabel: str) -> None:
    """Label the axes, and add ticks at whole iterations and a legend below the curves."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)


def _mark(axes: Axes, iteration: int | None, name: str) -> None:
    if iteration is not None:
        axes.axvline(iteration, color="#000000", linewidth=0.8, label=f"{name}, {iteration}")
