"""Seeded generators of problems: row i depends only on (seed, i) and the options.

A generator is a function `(num_examples, *, seed, **options)` that gives a list of
`ProceduralRow`, or of `EpisodeRow` for an environment; `PROCEDURAL_TASKS` lists them by name.
Problems and demonstrations draw from separate random streams, so the problems are the same whatever
the noise in the demonstrations.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_letters
from typing import Any

from vapo.errors import UserError
from vapo.prompts.checked_steps import checked_steps
from vapo.prompts.procedural_rows import EpisodeRow, ProceduralRow, check_range, check_steps
from vapo.prompts.windy_walk import windy_walk
from vapo.prompts.worked_sums import worked_sums


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
) -> list[ProceduralRow]:
    """Follow one ball through swaps of positions, one labelled swap at a time.

    `3a12b45c31=` means: the ball starts in position 3; a swaps 1 and 2, b swaps 4 and 5, c
    swaps 3 and 1. The response `a3b3c1;1` repeats each label with the position after that
    swap, then the final position, which is the answer. With `repeat_swaps` each step also
    repeats its swap, `a123b453c311;1`: four tokens a swap, for long responses that a small
    model can still learn. Labels run from a to z, then from A to Z, and start over after 52
    swaps: then a swap is found by its label and how often the label came before.

    Demonstrations can be made imperfect, which leaves room for reinforcement learning:
    with `skip_steps_probability` one has no steps and ends in a random position (`;4`); with
    `wrong_step_probability`, drawn for each swap, the position after it is wrong (uniform
    over the others) and the demonstration continues from there; with `early_stop_probability`,
    drawn for each swap, the demonstration stops before it and answers with where it is. With
    `terse_probability` one does not repeat its swaps, and has `terse_wrong_step_probability`:
    a choice between a long and a short way that shows in the outcome only.

    Raises:
        UserError: an option is out of range.

    >>> state_tracking(1, seed=0, min_steps=3, max_steps=3)[0].demonstration.count(";")
    1
    """
    noise = _Noise(
        repeat_swaps,
        skip_steps_probability,
        wrong_step_probability,
        early_stop_probability,
        terse_probability,
        terse_wrong_step_probability,
    )
    _check_options(min_steps, max_steps, num_positions, noise)
    lengths = (min_steps, max_steps)
    return [_row(seed, index, lengths, num_positions, noise) for index in range(num_examples)]


@dataclass(frozen=True)
class _Noise:
    """How demonstrations are written: the options of `state_tracking` of these names."""

    repeat_swaps: bool
    skip_steps_probability: float
    wrong_step_probability: float
    early_stop_probability: float
    terse_probability: float
    terse_wrong_step_probability: float


def _check_options(min_steps: int, max_steps: int, num_positions: int, noise: _Noise) -> None:
    check_range("num_positions", num_positions, low=2, high=9)
    check_steps(min_steps, max_steps)
    if noise.terse_probability and not noise.repeat_swaps:
        raise UserError(
            "options.terse_probability leaves out repeated swaps: set options.repeat_swaps to true"
        )
    for name, value in vars(noise).items():
        if name != "repeat_swaps":
            check_range(name, value, low=0, high=1)


def _row(
    seed: int, index: int, lengths: tuple[int, int], num_positions: int, noise: _Noise
) -> ProceduralRow:
    rng = Random(f"state_tracking/problem/{seed}/{index}")
    start = rng.randint(1, num_positions)
    num_steps = rng.randint(*lengths)
    swaps = [tuple(rng.sample(range(1, num_positions + 1), 2)) for _ in range(num_steps)]
    text, position = str(start), start
    for step, swap in enumerate(swaps):
        text += f"{_label(step)}{swap[0]}{swap[1]}"
        position = _after(position, swap)
    rng = Random(f"state_tracking/demonstration/{seed}/{index}")
    demonstration = _demonstration(rng, start, swaps, num_positions, noise)
    return ProceduralRow(f"{text}=", str(position), demonstration)


def _demonstration(
    rng: Random, start: int, swaps: list[tuple[int, ...]], num_positions: int, noise: _Noise
) -> str:
    is_terse = noise.terse_probability > 0 and rng.random() < noise.terse_probability
    if rng.random() < noise.skip_steps_probability:
        return f";{rng.randint(1, num_positions)}"
    wrong = noise.terse_wrong_step_probability if is_terse else noise.wrong_step_probability
    position, text = start, ""
    for step, swap in enumerate(swaps):
        if noise.early_stop_probability and rng.random() < noise.early_stop_probability:
            break
        position = _after(position, swap)
        if rng.random() < wrong:
            position = rng.choice([p for p in range(1, num_positions + 1) if p != position])
        repeated = f"{swap[0]}{swap[1]}" if noise.repeat_swaps and not is_terse else ""
        text += f"{_label(step)}{repeated}{position}"
    return f"{text};{position}"


def _label(step: int) -> str:
    return ascii_letters[step % len(ascii_letters)]


def _after(position: int, swap: tuple[int, ...]) -> int:
    first, second = swap
    return {first: second, second: first}.get(position, position)


PROCEDURAL_TASKS: Mapping[str, Callable[..., Sequence[ProceduralRow | EpisodeRow]]] = {
    "checked_steps": checked_steps,
    "windy_walk": windy_walk,
    "state_tracking": state_tracking,
    "worked_sums": worked_sums,
}


def generate(
    task: str | None, options: Mapping[str, Any], *, num_examples: int, seed: int
) -> Sequence[ProceduralRow | EpisodeRow]:
    """Generate the rows of one task of `PROCEDURAL_TASKS`.

    Raises:
        UserError: unknown task, unknown option, or an option's value is not usable.
    """
    if task is None or task not in PROCEDURAL_TASKS:
        raise UserError(f"task is {task!r}: {nearest(str(task), list(PROCEDURAL_TASKS))}")
    function = PROCEDURAL_TASKS[task]
    parameters = inspect.signature(function).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    checked = {}
    for name, value in options.items():
        if name not in defaults:
            fix = nearest(str(name), list(defaults))
            raise UserError(f"options.{name} is no option of {task}: {fix}")
        checked[name] = _as_type_of(defaults[name], name, value)
    return function(num_examples, seed=seed, **checked)


def _as_type_of(default: Any, name: str, value: Any) -> bool | int | float:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise UserError(f"options.{name} is {value!r}: give true or false")
        return value
    is_whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        expected = "a whole number" if is_whole else "a number"
        raise UserError(f"options.{name} is {value!r}: give {expected}")
    return value if is_whole else float(value)


def nearest(name: str, known: list[str]) -> str:
    """Suggest a fix for a misspelt name: the nearest known one, then all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)  # solution is not question
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"
