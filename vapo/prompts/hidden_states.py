"""What the maker of a problem knows of an unfinished response, for an oracle of its value.

A function `(problem, response) -> states` of the task's name: one text for each prefix of the
response, the empty one first. The value of a prefix depends on it as far as the task goes, so
the mean return of equal states is what a critic could know at best.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import ascii_letters

from vapo.prompts.checked_steps import checked_steps_states, own_check
from vapo.prompts.worked_sums import worked_sums_states

_PROBLEM = re.compile(r"(\d)((?:[A-Za-z]\d\d)+)=")


def state_tracking_states(problem: str, response: str) -> list[str] | None:
    """The states of `state_tracking`; None where the text is no problem of it.

    In a step: how many swaps are left, whether the last position was the ball's, whether every
    label was the right one; after the label (`a+` the right one, `a-` not) how many digits there
    are, `+` where the last is the ball's position after the swap, `c` where they do not begin to
    repeat the swap. After the semicolon: whether the ball was followed to the end, and whether the
    answer is right.

    >>> state_tracking_states("3a31=", "a1;1")
    ['1 on', '1 on a+', '1 on a+1+c', 'end on 0 left', 'right']
    """
    found = _PROBLEM.search(problem)
    if found is None:
        return None
    positions, swaps = [found[1]], re.findall(r"[A-Za-z](\d)(\d)", found[2])
    for first, second in swaps:
        positions.append({first: second, second: first}.get(positions[-1], positions[-1]))
    return [_state(response[:end], positions, swaps) for end in range(len(response) + 1)]


def _state(prefix: str, positions: list[str], swaps: list[tuple[str, str]]) -> str:
    steps, semicolon, answer = prefix.partition(";")
    written = re.findall(r"([^\d])(\d*)", steps)
    done = written if semicolon else written[:-1]  # the last one may go on
    labels_fit = all(_label(i) == label for i, (label, _) in enumerate(done))
    last = done[-1][1][-1:] if done else positions[0]
    is_on = labels_fit and len(done) < len(positions) and last == positions[len(done)]
    left = len(swaps) - len(done)
    following = "on" if is_on else "off"
    if answer:
        return "right" if answer == positions[-1] else "wrong"
    if semicolon:
        return f"end {following} {left} left"
    if not written:
        return f"{left} {following}"
    label, digits = written[-1]
    step = len(done)
    if step >= len(swaps):
        return f"beyond {following} {len(digits)}"
    ball, swap = positions[step + 1], swaps[step]
    marks = "+" if label == _label(step) else "-"
    expected = "".join(swap)
    kept = expected[: len(digits)] == digits[:2]
    is_ball = digits[-1:] == ball
    shown = f"{min(len(digits), 4)}{'+' if is_ball else '-'}{'' if kept else 'c'}" if digits else ""
    return f"{left} {following} a{marks}{shown}"


def _label(step: int) -> str:
    return ascii_letters[step % len(ascii_letters)]


HIDDEN_STATES: Mapping[str, Callable[[str, str], list[str] | None]] = {
    "checked_steps": checked_steps_states,
    "state_tracking": state_tracking_states,
    "worked_sums": worked_sums_states,
}
OWN_CHECKS: Mapping[str, Callable[[str], bool | None]] = {"checked_steps": own_check}
"""Of tasks whose responses judge their own steps: response so far -> whether it calls the step that
ends there wrong; None where no such judgement ends there."""
