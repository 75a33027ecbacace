"""Draws a right and a wrong response of a value page, one under the other, with their values.

    python experiments/value_pages/draw.py PAGE.html OUTPUT.png

A token is coloured by the value of the state in which it was sampled, as on the page; the line has
the same number at the token's left edge. The wrong response is not the best of the page: of those
that go wrong after their second step, to a prompt that has a right response as well, it is the one
whose value changes by the median over its first wrong step. The right one is the group's
first that writes every step, and none wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
from describe import column, page_data, token_texts  # beside this file
from wrong_steps import right_steps, written_steps

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap

WRONG, RIGHT = "#c2410c", "#1d4ed8"
COLOURS = LinearSegmentedColormap.from_list("value", ["#ea8a2e", "#ffffff", "#6ea3e8"])


def first_wrong(prompt: str, tokens: list[str]) -> int | None:
    """The index of the first wrong step's position."""
    return next((place for place, is_right in written_steps(prompt, tokens) if not is_right), None)


def chosen(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A group, its first right response, a wrong one."""
    found = []
    for group in data["groups"]:
        prompt, responses = group["prompt"], group["responses"]
        steps = [list(written_steps(prompt, token_texts(data, r))) for r in responses]
        whole = [(place, True) for place, _ in max(steps, key=len)]
        right = [
            r
            for r, written in zip(responses, steps, strict=True)
            if written == whole and len(whole) == len(right_steps(prompt)) and r["is_correct"]
        ]
        for response in responses:
            place = first_wrong(prompt, token_texts(data, response))
            if right and not response["is_correct"] and place is not None and place > 8:
                values = column(response, "value")
                if place + 2 >= len(values):
                    continue  # cut before the next state
                found.append((values[place + 2] - values[place], group, right[0], response))
    found.sort(key=lambda row: row[0])
    if not found:
        sys.exit("no prompt of this page has a right response and one with a wrong third step")
    return found[len(found) // 2][1:]


def draw(axes: Any, data: dict[str, Any], prompt: str, response: dict[str, Any]) -> None:
    tokens, values = token_texts(data, response), column(response, "value")
    place = first_wrong(prompt, tokens)
    for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
        is_end = len(token) > 1
        axes.add_patch(
            plt.Rectangle((i, -1.75), 1, 0.55, color=COLOURS(0.5 + 0.45 * float(value)), lw=0)
        )
        axes.text(
            i + 0.5,
            -1.48,
            "end" if is_end else token,
            ha="center",
            va="center",
            family="monospace",
            size=7 if is_end else 12,
            weight="bold" if i == place else "normal",
        )
    axes.axhline(0, color="0.85", lw=0.8, zorder=0)
    axes.plot(range(len(values)), values, color="0.2", lw=1.4, marker="o", ms=2.5)
    verdict, colour = ("right", RIGHT) if response["is_correct"] else ("wrong", WRONG)
    axes.set_title(f"verdict: {verdict}", color=colour, loc="left", size=10)
    if place is not None:
        axes.axvspan(place, place + 1, color=WRONG, alpha=0.15, lw=0)
        axes.text(place + 1.2, 0.97, "the first wrong position", color=WRONG, size=9, va="top")
    axes.set(ylim=(-1.8, 1.05), yticks=[-1, 0, 1], ylabel="value")
    axes.xaxis.set_visible(False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def main(page: Path, output: Path) -> None:
    data = page_data(page)
    group, right, wrong = chosen(data)
    figure, rows = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, layout="constrained")
    for axes, response in zip(rows, (right, wrong), strict=True):
        draw(axes, data, group["prompt"], response)
    longest = max(len(token_texts(data, response)) for response in (right, wrong))
    rows[0].set_xlim(-0.1, longest + 0.1)
    figure.suptitle(f"Two responses to {group['prompt']}", x=0.01, ha="left", size=11)
    figure.savefig(output, dpi=130)
    values, place = column(wrong, "value"), first_wrong(group["prompt"], token_texts(data, wrong))
    assert place is not None
    around = " ".join(f"{value:+.2f}" for value in values[place : place + 4])
    print(f"{output}: {group['prompt']}, from the first wrong position on: {around}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
