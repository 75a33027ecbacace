"""Walks in a wind: their problems, and demonstrations that follow where their steps led."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from vapo.errors import UserError
from vapo.prompts.procedural import generate
from vapo.prompts.procedural_rows import EpisodeRow
from vapo.prompts.windy_walk import windy_walk


def ends(row: EpisodeRow) -> tuple[int, int]:
    found = re.fullmatch(r"(\d\d)>(\d\d)=", row.problem)
    assert found is not None
    return int(found[1]), int(found[2])


def moves(row: EpisodeRow) -> list[tuple[int, int, int]]:
    """Place before, step, place after of each turn, by an account of its own."""
    place, wind = ends(row)[0], int(row.answer)
    found = []
    for turn in row.demonstration:
        before, step = place, int(turn)
        place = before + step
        if step in (20, -20):
            place += wind
        place = 0 if place < 0 else 99 if place > 99 else place
        found.append((before, step, place))
    return found


def without_wind(place: int, step: int) -> int:
    return sorted((0, place + step, 99))[1]


def test_problems_are_as_asked() -> None:
    rows = windy_walk(2000, seed=3, min_distance=5, max_distance=9, max_wind=1)
    distances = Counter(ends(row)[1] - ends(row)[0] for row in rows)
    assert set(distances) == {*range(5, 10), *range(-9, -4)}
    winds = Counter(row.answer for row in rows)
    assert set(winds) == {"-1", "0", "1"}
    assert all(abs(count - 667) < 100 for count in winds.values())  # 4.7 standard deviations


def test_a_demonstration_steps_closer_until_it_is_there() -> None:
    for row in windy_walk(300, seed=1, max_turns=8):
        target = ends(row)[1]
        for before, step, _ in moves(row):
            assert step in (1, -1, 5, -5, 20, -20)
            assert abs(target - without_wind(before, step)) < abs(target - before)
        places = [after for _, _, after in moves(row)]
        assert target not in places[:-1]
        assert places[-1] == target or len(places) == 8


def test_careless_steps_lead_away() -> None:
    def share_that_leads_away(**options: Any) -> float:
        away, total = 0, 0
        for row in windy_walk(400, seed=1, **options):
            target = ends(row)[1]
            for before, step, _ in moves(row):
                away += abs(target - without_wind(before, step)) >= abs(target - before)
            total += len(row.demonstration)
        return away / total

    assert share_that_leads_away() == 0
    assert 0.1 < share_that_leads_away(careless_step_probability=0.3) < 0.25


def test_problems_are_the_same_whatever_the_demonstrations() -> None:
    plain = windy_walk(50, seed=5)
    noisy = windy_walk(50, seed=5, careless_step_probability=0.5, max_turns=3)
    assert [(r.problem, r.answer) for r in plain] == [(r.problem, r.answer) for r in noisy]
    assert plain[:20] == windy_walk(20, seed=5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_distance": 0}, "options.min_distance"),
        ({"max_distance": 100}, "options.max_distance"),
        ({"min_distance": 50, "max_distance": 40}, "options.max_distance"),
        ({"max_wind": -1}, "options.max_wind"),
        ({"max_turns": 0}, "options.max_turns"),
        ({"careless_step_probability": 1.5}, "options.careless_step_probability"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        generate("windy_walk", options, num_examples=1, seed=0)
