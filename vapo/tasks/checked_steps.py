"""A procedural task whose steps are checked as they are written, and its oracle's states.

A problem names a start position and the keys to press. Only demonstrations show what a key does
from a position, and for some keys, the hard ones, they have misconceptions. After each step a check
says whether the position is the right one; it may miss some mistakes. So a mistake can be read as
soon as it is made, and one step is to blame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from random import Random
from string import ascii_lowercase

from vapo.tasks import MAX_STEPS, Row, check_range, check_shares, check_steps

POSITIONS = "12345"
HARD_KEYS, EASY_KEYS = "ABC", "DEFGH"
KEYS = HARD_KEYS + EASY_KEYS
RIGHT, WRONG = "+", "-"
FREE = ".:,!?*/~"
_PROBLEM = re.compile(rf"([{POSITIONS}])((?:[a-z][{KEYS}])+)=")


@cache
def moves() -> Mapping[tuple[str, str], str]:
    """Return the next position for each (key, position). Each key swaps the same two."""
    pairs = list(combinations(POSITIONS, 2))
    Random("checked_steps/moves/5").shuffle(pairs)
    table: dict[tuple[str, str], str] = {}
    for key, (a, b) in zip(KEYS, pairs, strict=False):
        table |= {(key, position): {a: b, b: a}.get(position, position) for position in POSITIONS}
    return table


@cache
def misconceptions() -> Mapping[tuple[str, str], str]:
    """Return for each (hard key, position) the wrong position that the misconception gives."""
    rng = Random("checked_steps/misconceptions")
    return {
        (key, position): rng.choice(POSITIONS.replace(moves()[key, position], ""))
        for key in HARD_KEYS
        for position in POSITIONS
    }


def checked_steps(
    num_examples: int,
    *,
    seed: int,
    min_steps: int = 6,
    max_steps: int = 14,
    num_free_tokens: int = 0,
    wrong_step_probability: float = 0.0,
    misconception_probability: float = 0.0,
    missed_check_probability: float = 0.0,
    early_stop_probability: float = 0.0,
) -> list[Row]:
    """Generate problems in which keys are pressed one by one, and each step is checked.

    `3aCbF=` means: start in position 3, press C, then F. A step of the response repeats the label
    and the key, and gives the new position and its check: `aC5+bF2+;2` ends with the answer. Labels
    run from a to z and start over. The keys A to C are hard; their share of a problem's keys is
    drawn for each problem, uniform from 0 to 1, so that some problems are much harder. With
    `num_free_tokens` a step has this many tokens without a meaning before its position.

    Demonstrations can be made imperfect. With `wrong_step_probability`, drawn for each step, the
    position is wrong (uniform over the others), and the demonstration continues from there. With
    `misconception_probability` a hard key leads where the misconception says, always to the same
    wrong position from the same position. The check is true, except that with
    `missed_check_probability`, drawn for each step, the check of a wrong position says that it is
    right. With `early_stop_probability`, drawn before each step, the demonstration ends there and
    answers with its present position.

    Raises: UserError: an option is out of range.

    >>> checked_steps(1, seed=0, min_steps=2, max_steps=2)[0]["demonstration"].count("+")
    2
    """
    check_steps(min_steps, max_steps)
    check_range("num_free_tokens", num_free_tokens, low=0, high=MAX_STEPS)
    shares = {
        "wrong_step_probability": wrong_step_probability,
        "misconception_probability": misconception_probability,
        "missed_check_probability": missed_check_probability,
        "early_stop_probability": early_stop_probability,
    }
    check_shares(**shares)
    rows = []
    for index in range(num_examples):
        rng = Random(f"checked_steps/problem/{seed}/{index}")
        start, keys = _draw_problem(rng, min_steps, max_steps)
        problem = start + "".join(_label(i) + key for i, key in enumerate(keys)) + "="
        rng = Random(f"checked_steps/demonstration/{seed}/{index}")
        demonstration = _demonstrate(rng, start, keys, num_free_tokens, **shares)
        answer = _positions(start, keys)[-1]
        rows.append({"prompt": problem, "answer": answer, "demonstration": demonstration})
    return rows


def _draw_problem(rng: Random, min_steps: int, max_steps: int) -> tuple[str, list[str]]:
    """Draw a problem; return the start position and the keys to press."""
    start, hard_share = rng.choice(POSITIONS), rng.random()
    num_steps = rng.randint(min_steps, max_steps)
    return start, [
        rng.choice(HARD_KEYS if rng.random() < hard_share else EASY_KEYS) for _ in range(num_steps)
    ]


def _positions(start: str, keys: Sequence[str]) -> list[str]:
    """Return the right positions: the start, then the position after each key."""
    positions = [start]
    for key in keys:
        positions.append(moves()[key, positions[-1]])
    return positions


def _demonstrate(
    rng: Random,
    start: str,
    keys: Sequence[str],
    num_free_tokens: int,
    *,
    wrong_step_probability: float,
    misconception_probability: float,
    missed_check_probability: float,
    early_stop_probability: float,
) -> str:
    text, position, right = "", start, _positions(start, keys)
    for step, key in enumerate(keys):
        if rng.random() < early_stop_probability:
            break
        previous_position, position = position, moves()[key, position]
        if (
            key,
            previous_position,
        ) in misconceptions() and rng.random() < misconception_probability:
            position = misconceptions()[key, previous_position]
        elif rng.random() < wrong_step_probability:
            position = rng.choice(POSITIONS.replace(position, ""))
        free = "".join(rng.choices(FREE, k=num_free_tokens))
        missed = missed_check_probability > 0 and rng.random() < missed_check_probability
        check = RIGHT if missed or position == right[step + 1] else WRONG
        text += f"{_label(step)}{key}{free}{position}{check}"
    return f"{text};{position}"


def oracle_states(problem: str, response: str) -> list[str] | None:
    """Return an oracle's state for each prefix of a response to a problem of `checked_steps`.

    It is None if the text is not such a problem. While everything is right, a state has the last
    part that was written, the number of steps left with hard keys, and the number of all steps left
    (`check on 2 of 5`). After a wrong label, key or position the state is `off`, until a position
    is right again by chance. After the semicolon a state says whether the position before it is the
    answer and how many steps were left out; after the answer, whether that is right.

    >>> oracle_states("1aC=", "aC5+;5")[:2]
    ['start on 1 of 1', 'label on 1 of 1']
    """
    match = _PROBLEM.search(problem)
    if match is None:
        return None
    keys = re.findall(r"[a-z](.)", match[2])
    return list(_states(keys, _positions(match[1], keys), response))


def marks_step_wrong(response: str) -> bool | None:
    """Whether the check that ends the response says `wrong`; None if no check ends it.

    >>> marks_step_wrong("aC5+bF2-"), marks_step_wrong("aC5+"), marks_step_wrong("aC5+b")
    (True, False, None)
    """
    return {WRONG: True, RIGHT: False}.get(response[-1:])


def _states(keys: list[str], positions: list[str], response: str) -> Iterator[str]:
    steps = len(keys)
    num_hard_left = [sum(key in HARD_KEYS for key in keys[step:]) for step in range(steps + 1)]
    last_part, step, is_on = "start", 0, True
    yield f"start on {num_hard_left[0]} of {steps}"
    for character in response:
        if last_part in ("right", "wrong"):
            pass
        elif last_part == "semicolon":
            last_part = "right" if character == positions[-1] else "wrong"
        elif character == ";":
            last_part = "semicolon"
        elif character in POSITIONS:
            last_part, step = "position", step + 1
            is_on = step < len(positions) and character == positions[step]
        elif character in KEYS:
            last_part = "key"
            is_on = is_on and step < len(keys) and character == keys[step]
        elif character in ascii_lowercase:
            last_part = "label"
            is_on = is_on and step < len(keys) and character == _label(step)
        else:
            last_part = "free" if character in FREE else "check"
        if last_part in ("right", "wrong"):
            yield last_part
        elif last_part == "semicolon":
            yield f"semicolon {'on' if is_on else 'off'} of {max(0, steps - step)}"
        else:
            yield (
                f"{last_part} on {num_hard_left[step]} of {steps - step}"
                if is_on
                else f"{last_part} off"
            )


def _label(step: int) -> str:
    return ascii_lowercase[step % len(ascii_lowercase)]
