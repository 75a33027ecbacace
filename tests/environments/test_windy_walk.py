"""The environment of the example: where a step leads, and that demonstrations fit it."""

from __future__ import annotations

from experiments.environments.windy_walk import WindyWalk
from vapo.prompts.windy_walk import windy_walk


def play(
    problem: str, turns: list[str], wind: int = 0, max_turns: int = 8
) -> list[tuple[str | None, float]]:
    environment = WindyWalk(max_turns)
    assert environment.reset({"prompt": problem, "answer": str(wind)}) == ""
    return [environment.step(turn) for turn in turns]


def test_it_says_what_is_left_and_pays_at_the_target() -> None:
    found = play("17>43=", ["+20", "+5", "+5", "-5", "+1"])
    assert found == [
        *(("37>43=", 0.0), ("42>43=", 0.0), ("47>43=", 0.0), ("42>43=", 0.0)),
        (None, 1.0),
    ]


def test_the_wind_carries_steps_of_20_to_its_side() -> None:
    assert play("30>99=", ["+20", "-20", "+5", "-1"], wind=2) == [
        *(("52>99=", 0.0), ("34>99=", 0.0), ("39>99=", 0.0), ("38>99=", 0.0))
    ]
    assert play("30>49=", ["+20"], wind=-1) == [(None, 1.0)]


def test_the_line_has_ends() -> None:
    assert play("03>50=", ["-5", "-1"]) == [("00>50=", 0.0), ("00>50=", 0.0)]
    assert play("90>99=", ["+20"], wind=2) == [(None, 1.0)]


def test_the_last_turn_ends_it_without_pay() -> None:
    assert play("10>50=", ["+20", "+1"], max_turns=2) == [("30>50=", 0.0), (None, 0.0)]
    assert play("10>50=", ["+20", "+20"], max_turns=2) == [("30>50=", 0.0), (None, 1.0)]


def test_what_is_no_step_is_a_turn_without_a_move() -> None:
    for text in ("", "5", "+2", "+5+5", "=+5", "+\u0665"):
        assert play("10>15=", [text, "+5"], wind=1) == [("10>15=", 0.0), (None, 1.0)]


def test_a_demonstration_is_an_episode() -> None:
    arrived = 0
    for row in windy_walk(300, seed=0, max_turns=6, careless_step_probability=0.2):
        turns = list(row.demonstration)
        *before, (observation, reward) = play(row.problem, turns, int(row.answer), max_turns=6)
        assert all(left is not None and pay == 0 for left, pay in before)
        assert observation is None
        assert reward == 1 or len(turns) == 6
        arrived += reward == 1
    assert 50 < arrived < 250
