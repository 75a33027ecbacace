"""Does the critic notice the first wrong step? Reads value pages of the state-tracking task.

    python experiments/value_pages/wrong_steps.py MLRUNS/artifacts/RUN/artifacts/value_pages/*.html

For each page: the mean change of the value over a response's first wrong step, with its standard
error, and over the right ones before it; and the calibration, predicted -> achieved (tokens).
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np


def page_data(page: Path) -> dict[str, Any]:
    start = page.read_text().partition('id="data">')[2]
    data = json.loads(start.partition("</script")[0])
    assert isinstance(data, dict)
    return data


def right_steps(prompt: str) -> list[str]:
    """`1a14b34=` starts at 1, swaps 1 and 4, then 3 and 4: a4, b3."""
    position, steps = prompt[0], []
    for label, first, second in re.findall(r"([a-z])(\d)(\d)", prompt):
        position = {first: second, second: first}.get(position, position)
        steps.append(label + position)
    return steps


def value_changes(data: dict[str, Any]) -> tuple[list[float], list[float]]:
    """V after a step's digit less V before it: of right steps, of first wrong ones."""
    right: list[float] = []
    wrong: list[float] = []
    for group in data["groups"]:
        truth = right_steps(group["prompt"])
        for response in group["responses"]:
            ids = np.frombuffer(base64.b64decode(response["ids"]), "<i4")
            packed = response["columns"]["value"]
            if isinstance(packed, float):
                continue
            values = np.frombuffer(base64.b64decode(packed), "<f4")
            text = "".join(data["tokens"][str(i)] for i in ids).partition(";")[0]
            for index, step in enumerate(re.findall(r"[a-z]\d", text)):
                digit = 2 * index + 1
                if digit + 1 >= len(ids):
                    break
                change = float(values[digit + 1] - values[digit])
                if index < len(truth) and step == truth[index]:
                    right.append(change)
                else:
                    wrong.append(change)
                    break
    return right, wrong


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        data = page_data(path)
        right, wrong = value_changes(data)
        error = np.std(wrong) / max(1, len(wrong)) ** 0.5
        print(
            f"{path.stem}: first wrong step {np.mean(wrong):+.4f} +- {error:.4f} ({len(wrong)}), "
            f"right ones {np.mean(right):+.4f} ({len(right)})"
        )
        rows = data["calibration"]
        bins = zip(rows["value_mean"], rows["return_mean"], rows["num_tokens"], strict=True)
        print("  " + "  ".join(f"{v:.2f}->{r:.2f} ({n})" for v, r, n in bins))


if __name__ == "__main__":
    main(sys.argv[1:])
