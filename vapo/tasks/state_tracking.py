"""A procedural task in which a ball is followed through swaps of positions, and its oracle's
states."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from string import ascii_letters
from typing import TypeVar

from vapo.errors import UserError
from vapo.tasks import Row, check_range, check_shares, check_steps

_Position = TypeVar("_Position", int, str)
_PROBLEM = re.compile(r"(\d)((?:[A-Za-z]\d\d)+)=")


def state_tracking(
    num_examples: int,
    *,
    seed: int,
    min_steps: int = 2,
    max_steps: int = 10,
    num_positions: int = 5,
    repeat_swaps: bool = False,
    skip_steps_probability: float = 0.0,
    wrong_step_probability: float = 0.0,
    early_stop_probability: float = 0.0,
    terse_probability: float = 0.0,
    terse_wrong_step_probability: float = 0.0,
) -> list[Row]:
    """Generate problems in which one ball is followed through swaps of positions, swap by swap.

    `3a12b45c31=` means: the ball starts in position 3; a swaps 1 and 2, b swaps 4 and 5, c swaps 3
    and 1. The response `a3b3c1;1` repeats each label with the position after that swap, then the
    final position, which is the answer. With `repeat_swaps` each step also repeats its swap,
    `a123b453c311;1`: four tokens a swap, for long responses that a small model can still learn.
    Labels run from a to z, then from A to Z, and start over after 52 swaps: then a swap is found by
    its label and how often the label came before.

    Demonstrations can be made imperfect, which leaves room for reinforcement learning. With
    `skip_steps_probability` a demonstration has no steps and ends in a random position (`;4`). With
    `wrong_step_probability`, drawn for each swap, the position after it is wrong (uniform over the
    others) and the demonstration continues from there. With `early_stop_probability`, drawn for
    each swap, the demonstration ends before it and answers with the present position. With
    `terse_probability` it does not repeat its swaps, and its steps are wrong with
    `terse_wrong_step_probability`: a choice between a long and a short way that shows in the
    outcome only.

    Raises: UserError: an option is out of range.

    >>> state_tracking(1, seed=0, min_steps=3, max_steps=3)[0]["demonstration"].count(";")
    1
    """
    check_range("num_positions", num_positions, low=2, high=9)
    check_steps(min_steps, max_steps)
    if terse_probability and not repeat_swaps:
        raise UserError(
            "options.terse_probability leaves out repeated swaps: set options.repeat_swaps to true"
        )
    shares = {
        "skip_steps_probability": skip_steps_probability,
        "wrong_step_probability": wrong_step_probability,
        "early_stop_probability": early_stop_probability,
        "terse_probability": terse_probability,
        "terse_wrong_step_probability": terse_wrong_step_probability,
    }
    check_shares(**shares)
    rows = []
    for index in range(num_examples):
        rng = Random(f"state_tracking/problem/{seed}/{index}")
        start, places = rng.randint(1, num_positions), range(1, num_positions + 1)
        swaps = [tuple(rng.sample(places, 2)) for _ in range(rng.randint(min_steps, max_steps))]
        text = f"{start}{''.join(f'{_label(i)}{a}{b}' for i, (a, b) in enumerate(swaps))}="
        rng = Random(f"state_tracking/demonstration/{seed}/{index}")
        demonstration = _demonstration(rng, start, swaps, num_positions, repeat_swaps, **shares)
        answer = str(_positions(start, swaps)[-1])
        rows.append({"prompt": text, "answer": answer, "demonstration": demonstration})
    return rows


def _demonstration(
    rng: Random,
    start: int,
    swaps: list[tuple[int, ...]],
    num_positions: int,
    repeat_swaps: bool,
    *,
    skip_steps_probability: float,
    wrong_step_probability: float,
    early_stop_probability: float,
    terse_probability: float,
    terse_wrong_step_probability: float,
) -> str:
    is_terse = terse_probability > 0 and rng.random() < terse_probability
    if rng.random() < skip_steps_probability:
        return f";{rng.randint(1, num_positions)}"
    wrong = terse_wrong_step_probability if is_terse else wrong_step_probability
    position, text = start, ""
    for step, swap in enumerate(swaps):
        if early_stop_probability and rng.random() < early_stop_probability:
            break
        position = _after(position, swap)
        if rng.random() < wrong:
            position = rng.choice([p for p in range(1, num_positions + 1) if p != position])
        repeated = f"{swap[0]}{swap[1]}" if repeat_swaps and not is_terse else ""
        text += f"{_label(step)}{repeated}{position}"
    return f"{text};{position}"


def _label(step: int) -> str:
    return ascii_letters[step % len(ascii_letters)]


def _after(position: _Position, swap: tuple[_Position, ...]) -> _Position:
    first, second = swap
    return {first: second, second: first}.get(position, position)


def _positions(start: _Position, swaps: Sequence[tuple[_Position, ...]]) -> list[_Position]:
    """Return the ball's positions: the start, then the position after each swap."""
    positions = [start]
    for swap in swaps:
        positions.append(_after(positions[-1], swap))
    return positions


def oracle_states(problem: str, response: str) -> list[str] | None:
    """Return an oracle's state for each prefix of a response to a problem of `state_tracking`.

    It is None if the text is not such a problem. Within a step a state has the number of swaps that
    are left, and `on` if all labels and the last position were right, else `off`. After the label
    come `a+` if it is right, else `a-`; after digits their number (at most 4), `+` if the last one
    is the ball's position after the swap (else `-`), and `c` if they do not repeat the swap. After
    the last swap a further step is `beyond`, with the number of its digits. After the semicolon a
    state says whether the ball was followed to the end; after the answer, whether that is right.

    >>> oracle_states("3a31=", "a1;1")
    ['1 on', '1 on a+', '1 on a+1+c', 'end on 0 left', 'right']
    """
    match = _PROBLEM.search(problem)
    if match is None:
        return None
    swaps = re.findall(r"[A-Za-z](\d)(\d)", match[2])
    positions = _positions(match[1], swaps)
    return [_state(response[:end], positions, swaps) for end in range(len(response) + 1)]


def _state(prefix: str, positions: list[str], swaps: list[tuple[str, str]]) -> str:
    steps, semicolon, answer = prefix.partition(";")
    parts = re.findall(r"([^\d])(\d*)", steps)
    finished_parts = parts if semicolon else parts[:-1]  # the last one may go on
    labels_fit = all(_label(i) == label for i, (label, _) in enumerate(finished_parts))
    last = finished_parts[-1][1][-1:] if finished_parts else positions[0]
    is_on = (
        labels_fit
        and len(finished_parts) < len(positions)
        and last == positions[len(finished_parts)]
    )
    num_left = len(swaps) - len(finished_parts)
    following = "on" if is_on else "off"
    if answer:
        return "right" if answer == positions[-1] else "wrong"
    if semicolon:
        return f"end {following} {num_left} left"
    if not parts:
        return f"{num_left} {following}"
    label, digits = parts[-1]
    step = len(finished_parts)
    if step >= len(swaps):
        return f"beyond {following} {len(digits)}"
    ball, swap = positions[step + 1], swaps[step]
    marks = "+" if label == _label(step) else "-"
    expected = "".join(swap)
    repeats_swap = expected[: len(digits)] == digits[:2]
    is_ball = digits[-1:] == ball
    digits_text = (
        f"{min(len(digits), 4)}{'+' if is_ball else '-'}{'' if repeats_swap else 'c'}"
        if digits
        else ""
    )
    return f"{num_left} {following} a{marks}{digits_text}"
