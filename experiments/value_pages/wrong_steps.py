"""Does the critic notice the first wrong step? Reads value pages.

    python experiments/value_pages/wrong_steps.py PAGE.html ...

For each page the mean value of a response's first wrong step, with its standard error: before its
position is written, once it is written, and, in checked steps, once its check is written as well;
and the same of the right steps before it. Then the calibration, predicted -> achieved (tokens).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from describe import column, page_data, token_texts

from vapo.prompts.checked_steps import moves

CHECKED = re.compile(r"(\d)((?:[a-z][A-H])+)=")
SWAPS = re.compile(r"(\d)((?:[a-z]\d\d)+)=")


def right_steps(prompt: str) -> list[str]:
    """`3aAbD=` starts at 3, presses A, then D: aA5, bD5. `1a14b34=` swaps 1 and 4: a4, b3."""
    if found := CHECKED.search(prompt):
        pairs = re.findall(r"([a-z])([A-H])", found[2])
        steps, position = [], found[1]
        for label, key in pairs:
            position = moves()[key, position]
            steps.append(label + key + position)
        return steps
    found = SWAPS.search(prompt)
    assert found is not None, prompt
    steps, position = [], found[1]
    for label, first, second in re.findall(r"([a-z])(\d)(\d)", found[2]):
        position = {first: second, second: first}.get(position, position)
        steps.append(label + position)
    return steps


def written_steps(prompt: str, tokens: list[str]) -> Iterator[tuple[int, bool]]:
    """The index of each step's position, and whether it is right, up to the first wrong one.

    Every token is one character.
    """
    response = "".join(tokens).partition(";")[0]
    pattern = r"[a-z][A-H]\d[+-]" if CHECKED.search(prompt) else r"[a-z]\d"
    truth = right_steps(prompt)
    for index, found in enumerate(re.finditer(pattern, response)):
        step = found[0].rstrip("+-")
        is_right = index < len(truth) and step == truth[index]
        yield found.start() + len(step) - 1, is_right
        if not is_right:
            break


def values_of_steps(data: dict[str, Any]) -> dict[bool, np.ndarray]:
    """[step, 3 in checked steps, else 2] of right steps (True) and first wrong ones (False)."""
    rows: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for group in data["groups"]:
        num = 3 if CHECKED.search(group["prompt"]) else 2
        for response in group["responses"]:
            values, tokens = column(response, "value"), token_texts(data, response)
            for place, is_right in written_steps(group["prompt"], tokens):
                if place + num <= len(values):
                    rows[is_right].append(values[place : place + num])
    return {key: np.array(found) for key, found in rows.items()}


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        data = page_data(path)
        print(path.stem)
        for is_right, name in ((False, "first wrong step"), (True, "right steps before it")):
            values = values_of_steps(data)[is_right]
            if not len(values):
                print(f"  {name}: none on this page")
                continue
            change = values[:, -1] - values[:, 0]
            means = " -> ".join(f"{x:+.3f}" for x in values.mean(axis=0))
            error = change.std() / len(change) ** 0.5
            print(
                f"  {name}: {means}, change {change.mean():+.3f} +- {error:.3f} ({len(change)}); "
                f"falls by more than 0.1 in {(change < -0.1).mean():.0%}"
            )
        rows = data["calibration"]
        bins = zip(rows["value_mean"], rows["return_mean"], rows["num_tokens"], strict=True)
        print("  " + "  ".join(f"{v:.2f}->{r:.2f} ({n})" for v, r, n in bins))


if __name__ == "__main__":
    main(sys.argv[1:])
