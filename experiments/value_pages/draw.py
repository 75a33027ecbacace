"""Draws a right response of a value page and one with an unmarked mistake, with their values.

    python experiments/value_pages/draw.py PAGE.html OUTPUT.png

A token is coloured by the value of the state in which it was sampled, as on the page; the line
has the same number at the token's left edge. The first wrong step of the wrong response is
unmarked: its own check calls it right, or the task has no checks, so its value cannot be read from
a check (`wrong_steps.py`). It is not the best of the page: of all such wrong responses, to a
prompt that has a right response as well, that go wrong after their second step, it is the one
whose value changes by the median over that step. The right one is the group's first that writes
every step, and none wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
from describe import column, page_data, token_texts  # beside this file
from wrong_steps import first_wrong, right_steps, written_steps

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap

WRONG, RIGHT = "#c2410c", "#1d4ed8"
COLOURS = LinearSegmentedColormap.from_list("value", ["#ea8a2e", "#ffffff", "#6ea3e8"])


def chosen(data: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The number of wrong responses to choose from; the group, its first right response and the
    chosen wrong one."""
    candidates = []
    for group in data["groups"]:
        prompt, responses = group["prompt"], group["responses"]
        right = [r for r in responses if r["is_correct"] and is_whole(prompt, token_texts(data, r))]
        for response in responses:
            step = first_wrong(prompt, token_texts(data, response))
            if not right or response["is_correct"] or step is None or step.is_marked:
                continue
            values = column(response, "value")
            if 8 < step.place < len(values) - 2:  # not cut before the state after its check
                change = float(values[step.place + 2] - values[step.place])
                candidates.append((change, group, right[0], response))
    candidates.sort(key=lambda row: row[0])
    if not candidates:
        sys.exit("no prompt of this page has a right response and one with an unmarked mistake")
    return len(candidates), *candidates[len(candidates) // 2][1:]


def is_whole(prompt: str, tokens: list[str]) -> bool:
    steps = list(written_steps(prompt, tokens))
    return len(steps) == len(right_steps(prompt)) and all(step.is_right for step in steps)


def draw(axes: Any, data: dict[str, Any], prompt: str, response: dict[str, Any]) -> None:
    tokens, values = token_texts(data, response), column(response, "value")
    step = first_wrong(prompt, tokens)
    place = None if step is None else step.place
    for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
        is_word = len(token) > 1
        name = "end" if i == len(tokens) - 1 and is_word else token.strip()
        axes.add_patch(
            plt.Rectangle((i, -1.75), 1, 0.55, color=COLOURS(0.5 + 0.45 * float(value)), lw=0)
        )
        axes.text(
            i + 0.5,
            -1.48,
            name,
            ha="center",
            va="center",
            family="monospace",
            size=6 if is_word else 12 if len(tokens) < 40 else 10,
            weight="bold" if i == place else "normal",
        )
    axes.axhline(0, color="0.85", lw=0.8, zorder=0)
    axes.plot(range(len(values)), values, color="0.2", lw=1.4, marker="o", ms=2.5)
    verdict, colour = ("right", RIGHT) if response["is_correct"] else ("wrong", WRONG)
    axes.set_title(f"verdict: {verdict}", color=colour, loc="left", size=10)
    if step is not None:
        axes.axvspan(step.place, step.place + 1, color=WRONG, alpha=0.15, lw=0)
        check = "" if step.is_marked is None else ', and its check says "+"'
        axes.text(
            step.place + 1.2,
            0.97,
            f"the first wrong {'token' if step.is_marked is None else 'position'}{check}",
            color=WRONG,
            size=9,
            va="top",
        )
    axes.set(ylim=(-1.8, 1.05), yticks=[-1, 0, 1], ylabel="value")
    axes.xaxis.set_visible(False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def main(page: Path, output: Path) -> None:
    data = page_data(page)
    num, group, right, wrong = chosen(data)
    figure, rows = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, layout="constrained")
    for axes, response in zip(rows, (right, wrong), strict=True):
        draw(axes, data, group["prompt"], response)
    longest = max(len(token_texts(data, response)) for response in (right, wrong))
    rows[0].set_xlim(-0.1, longest + 0.1)
    figure.suptitle(f"Two responses to {group['prompt']}", x=0.01, ha="left", size=11)
    figure.savefig(output, dpi=130)
    values, step = column(wrong, "value"), first_wrong(group["prompt"], token_texts(data, wrong))
    assert step is not None
    around = " ".join(f"{value:+.2f}" for value in values[step.place : step.place + 4])
    print(f"{output}: {group['prompt']}, from the first wrong position on: {around}")
    print(f"the median of {num} wrong responses whose first wrong step is unmarked")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
