"""Walks to a place in a hidden wind, in an environment, with demonstrations of several turns."""

from __future__ import annotations

from random import Random

from vapo.prompts.procedural_rows import EpisodeRow, check_bounds, check_range, check_shares

LAST = 99
STEPS = (1, 5, 20)
MAX_TURNS = 1000
MAX_WIND = 4


def windy_walk(
    num_examples: int,
    *,
    seed: int,
    min_distance: int = 10,
    max_distance: int = 90,
    max_wind: int = 2,
    max_turns: int = 8,
    careless_step_probability: float = 0.0,
) -> list[EpisodeRow]:
    """Walk from one place to another on a line from 0 to 99, one step a turn.

    `17>63=` means: from 17 to 63. A turn is a step of 1, 5 or 20 in either direction, `+5` or
    `-20`. A step of 20 lands as far beside its end as the wind is strong, always on the same side.
    The wind is hidden: it is the row's answer, from -`max_wind` to `max_wind`.

    A demonstration is a list of turns, up to the target or the last of `max_turns`. Its steps are
    drawn uniformly from those that would bring it closer without wind; with
    `careless_step_probability`, drawn for each step, from all. So demonstrations show what a step
    is, and leave to reinforcement learning which steps lead to the target in time.

    Raises: UserError: an option is out of range.

    >>> row = windy_walk(2, seed=0)[1]
    >>> row.problem, row.answer, row.demonstration
    ('70>56=', '2', ('-5', '-1', '-5', '-5', '+1', '+1'))
    """
    check_bounds("distance", min_distance, max_distance, low=1, high=LAST)
    check_range("max_wind", max_wind, low=0, high=MAX_WIND)
    check_range("max_turns", max_turns, low=1, high=MAX_TURNS)
    check_shares(careless_step_probability=careless_step_probability)
    rows = []
    for index in range(num_examples):
        rng = Random(f"windy_walk/problem/{seed}/{index}")
        distance = rng.randint(min_distance, max_distance)
        low = rng.randint(0, LAST - distance)
        start, target = rng.sample((low, low + distance), 2)
        wind = rng.randint(-max_wind, max_wind)
        rng = Random(f"windy_walk/demonstration/{seed}/{index}")
        turns = _demonstration(rng, (start, target), wind, max_turns, careless_step_probability)
        rows.append(EpisodeRow(f"{start:02d}>{target:02d}=", str(wind), turns))
    return rows


def after(place: int, step: int, wind: int) -> int:
    """Where a step leads: 20 with the wind beside it, and never beyond the line's ends."""
    return min(max(place + step + (wind if abs(step) == max(STEPS) else 0), 0), LAST)


def _demonstration(
    rng: Random, ends: tuple[int, int], wind: int, max_turns: int, careless: float
) -> tuple[str, ...]:
    place, target = ends
    turns: list[str] = []
    steps = [sign * size for size in STEPS for sign in (1, -1)]
    while place != target and len(turns) < max_turns:
        closer = [s for s in steps if abs(target - after(place, s, 0)) < abs(target - place)]
        step = rng.choice(steps if careless and rng.random() < careless else closer)
        place = after(place, step, wind)
        turns.append(f"{step:+d}")
    return tuple(turns)
