"""Draws what each critic of the board knows, beside the oracle.

python experiments/critics/board/draw_critics.py
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

from vapo.sweep.report.style import house_style

HERE = Path(__file__).parent
PANELS = {
    "explained_variance": "explained variance\nof the returns",
    "truth_within_prompts": "of the truth\nwithin prompts",
    "truth_within_responses": "of the truth\nwithin responses",
    "mistakes_named": "first mistakes\nnamed",
}
LEAST = -0.6  # values below it are drawn at the edge, as an arrow


def draw(results: dict[str, dict[str, list[float]]]) -> Figure:
    names = sorted(results, key=lambda name: results[name]["explained_variance"][0])
    with house_style():
        figure = Figure(figsize=(10, 0.9 + 0.3 * len(names)), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for axes, (key, title) in zip(panels, PANELS.items(), strict=True):
            for place, name in enumerate(names):
                value, low, high = results[name][key]
                colour = "#666666" if name == "oracle" else "C0"
                axes.plot(
                    [max(low, LEAST), high], [place, place], color=colour, linewidth=2, alpha=0.5
                )
                marker = "o" if value >= LEAST else "<"
                axes.plot(max(value, LEAST), place, marker, color=colour, clip_on=False)
            oracle = results["oracle"][key][0]
            axes.axvline(oracle, color="#666666", linestyle="--", linewidth=1)
            axes.axvline(0, color="#bbbbbb", linewidth=1)
            axes.set_xlim(LEAST if key != "mistakes_named" else -0.05, 1.05)
            axes.set_title(title, fontsize=10)
            axes.grid(axis="y", visible=False)
        panels[0].set_yticks(range(len(names)), names)
    return figure


def main() -> None:
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    draw(results).savefig(HERE / "what_critics_know.png", dpi=120)


if __name__ == "__main__":
    main()
