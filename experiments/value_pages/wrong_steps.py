"""Does the critic see the first wrong step, or only the policy's own verdict? Reads value pages.

    python experiments/value_pages/wrong_steps.py PAGE.html ...

In checked steps the policy writes a check after each step. A wrong step with a `-` is **marked**:
a critic that reads the check alone sees it. One with a `+` is **unmarked**: the critic has to see
the step itself. They are counted apart, and the unmarked ones once more by whether they are a
misconception, which the demonstrations show again and again, or another mistake, which the critic
has hardly met. Swaps and worked sums have no checks, so none of their steps is marked.

For each page the mean value over a response's first wrong step, with the standard error of its
change: before its position is written, once it is written, and once its check is; the same of the
right steps before it. Then the mean value before the last token of finished responses, and the
calibration, predicted -> achieved (tokens).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from describe import column, page_data, token_texts

from vapo.tasks.checked_steps import misconceptions, moves

CHECKED = re.compile(r"(\d)((?:[a-z][A-H])+)=")
SWAPS = re.compile(r"(\d)((?:[a-z]\d\d)+)=")
SUMS = re.compile(r"(\d+)((?:[+-]\d+)+)=")
UNMARKED = "first wrong step, unmarked (+)"
MISCONCEPTION, OTHER = f"{UNMARKED}, a misconception", f"{UNMARKED}, another mistake"
KINDS = {
    (False, True): "first wrong step, marked -",
    (False, False): UNMARKED,
    (False, None): "first wrong step, a task without checks",
    (True, True): "right steps before it, marked -",
    (True, False): "right steps before it, unmarked (+)",
    (True, None): "right steps before it, a task without checks",
}


class Step(NamedTuple):
    """A step of a response: the index of its position's token (of a sum: its first wrong one, or
    its last), whether it is right, whether its check calls it wrong (None where the task has no
    checks), and whether it is a misconception."""

    place: int
    is_right: bool
    is_marked: bool | None
    is_misconception: bool = False


def right_steps(prompt: str) -> list[str]:
    """`3aAbD=` starts at 3, presses A, then D: aA5, bD5. `1a14b34=` swaps 1 and 4: a4, b3.
    `47+8-3=` adds up: 47+8=55, 55-3=52."""
    if match := CHECKED.search(prompt):
        pairs = re.findall(r"([a-z])([A-H])", match[2])
        steps, position = [], match[1]
        for label, key in pairs:
            position = moves()[key, position]
            steps.append(label + key + position)
        return steps
    steps = []
    if match := SUMS.search(prompt):
        total = int(match[1])
        for term in re.findall(r"[+-]\d+", match[2]):
            steps.append(f"{total}{term}={total + int(term)}")
            total += int(term)
        return steps
    match = SWAPS.search(prompt)
    assert match is not None, prompt
    position = match[1]
    for label, first, second in re.findall(r"([a-z])(\d)(\d)", match[2]):
        position = {first: second, second: first}.get(position, position)
        steps.append(label + position)
    return steps


def written_steps(prompt: str, tokens: list[str]) -> Iterator[Step]:
    """The steps of a response up to the first wrong one. Every token of a step is one character."""
    if SUMS.search(prompt):
        yield from written_sums(right_steps(prompt), tokens)
        return
    response = "".join(tokens).partition(";")[0]
    pattern = r"[a-z][A-H]\d[+-]" if CHECKED.search(prompt) else r"[a-z]\d"
    truth = right_steps(prompt)
    for index, match in enumerate(re.finditer(pattern, response)):
        step = match[0].rstrip("+-")
        check = match[0][len(step) :]
        is_right = index < len(truth) and step == truth[index]
        is_marked = check == "-" if check else None
        is_known = not is_right and is_misconception(prompt, index, step)
        yield Step(match.start() + len(step) - 1, is_right, is_marked, is_known)
        if not is_right:
            break


def written_sums(truth: list[str], tokens: list[str]) -> Iterator[Step]:
    worked, start = "".join(tokens).partition(".")[0], 0
    for index, step in enumerate(worked.split(";")):
        right = truth[index] if index < len(truth) else ""
        wrong = next((i for i in range(len(step)) if not right.startswith(step[: i + 1])), None)
        if wrong is None and step != right:
            wrong = len(step)  # it ends too early
        place = start + (len(step) - 1 if wrong is None else wrong)
        yield Step(place, is_right=wrong is None, is_marked=None)
        if wrong is not None:
            break
        start += len(step) + 1


def is_misconception(prompt: str, index: int, step: str) -> bool:
    """Whether this is where a hard key leads by mistake from the right position before it."""
    match, truth = CHECKED.search(prompt), right_steps(prompt)
    if match is None or index >= len(truth) or step[:2] != truth[index][:2]:
        return False
    previous = truth[index - 1][-1] if index else match[1]
    return misconceptions().get((step[1], previous)) == step[2]


def first_wrong(prompt: str, tokens: list[str]) -> Step | None:
    return next((step for step in written_steps(prompt, tokens) if not step.is_right), None)


def values_of_steps(data: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Kind of step -> [step, 3 in checked steps, else 2]; kinds without steps are left out."""
    kinds = [*KINDS.values(), MISCONCEPTION, OTHER]
    rows: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
    for group in data["groups"]:
        for response in group["responses"]:
            values, tokens = column(response, "value"), token_texts(data, response)
            for place, is_right, is_marked, is_known in written_steps(group["prompt"], tokens):
                num, kind = 2 if is_marked is None else 3, KINDS[is_right, is_marked]
                around = values[place : place + num]
                if len(around) == num:  # else cut before the state after it
                    rows[kind].append(around)
                    if kind == UNMARKED:
                        rows[MISCONCEPTION if is_known else OTHER].append(around)
    return {kind: np.array(kind_values) for kind, kind_values in rows.items() if kind_values}


def values_at_ends(data: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Kind of finished response -> the values before its last token."""
    rows: dict[str, list[float]] = {}
    for group in data["groups"]:
        for response in group["responses"]:
            tokens = token_texts(data, response)
            if len(tokens[-1]) == 1:
                continue  # cut before its end token
            wrong = first_wrong(group["prompt"], tokens)
            if response["is_correct"]:
                kind = "right"
            elif wrong is None:
                kind = "wrong, without a wrong step"
            elif CHECKED.search(group["prompt"]) and "-" in tokens:
                kind = "wrong, with a check -"
            else:
                kind = "wrong, with no check -"
            rows.setdefault(kind, []).append(float(column(response, "value")[-1]))
    return {kind: np.array(rows[kind]) for kind in sorted(rows)}


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        data = page_data(path)
        print(path.stem)
        for kind, values in values_of_steps(data).items():
            change = values[:, -1] - values[:, 0]
            means = " -> ".join(f"{x:+.3f}" for x in values.mean(axis=0))
            error = change.std() / len(change) ** 0.5
            print(
                f"  {kind}: {means}, change {change.mean():+.3f} +- {error:.3f} ({len(change)}); "
                f"falls by more than 0.1 in {(change < -0.1).mean():.0%}"
            )
        for kind, ends in values_at_ends(data).items():
            print(f"  at the end of responses, {kind}: {ends.mean():+.3f} ({len(ends)})")
        rows = data["calibration"]
        bins = zip(rows["value_mean"], rows["return_mean"], rows["num_tokens"], strict=True)
        print("  " + "  ".join(f"{v:.2f}->{r:.2f} ({n})" for v, r, n in bins))


if __name__ == "__main__":
    main(sys.argv[1:])
