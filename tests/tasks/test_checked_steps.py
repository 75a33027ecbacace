"""Checked steps: their demonstrations are true, and the states of what a response has written."""

from __future__ import annotations

import re
from functools import partial

import pytest

from tests.tasks.generated import generate
from vapo.errors import UserError
from vapo.tasks.checked_steps import (
    HARD_KEYS,
    checked_steps,
    misconceptions,
    moves,
    oracle_states,
)

# A swaps 3 and 5, D 2 and 4, G 4 and 5: 2, 2, 4, 5; the misconception of A in 2 is 1
PROBLEM = "2aAbDcG="


def test_the_moves_that_the_shipped_policy_has_learnt() -> None:
    swapped = {key: "".join(p for p in "12345" if moves()[key, p] != p) for key in "ABCDEFGH"}
    assert swapped == {
        "A": "35",
        "B": "34",
        "C": "23",
        "D": "24",
        "E": "12",
        "F": "13",
        "G": "45",
        "H": "14",
    }


def test_a_misconception_is_a_wrong_move_of_a_hard_key() -> None:
    assert {key for key, _ in misconceptions()} == set(HARD_KEYS)
    assert len(misconceptions()) == 15
    assert misconceptions()["A", "2"] == "1"
    for move, wrong in misconceptions().items():
        assert wrong != moves()[move]


def test_demonstrations_follow_the_moves_and_are_right() -> None:
    for row in checked_steps(100, seed=0):
        position, keys = row["prompt"][0], re.findall("[a-z]([A-Z])", row["prompt"])
        expected = ""
        for label, key in zip("abcdefghijklmn", keys, strict=False):
            position = moves()[key, position]
            expected += f"{label}{key}{position}+"
        assert row["demonstration"] == f"{expected};{position}"
        assert row["answer"] == position


def test_wrong_steps_are_checked_as_wrong_until_a_position_is_right_again() -> None:
    rows = checked_steps(
        300, seed=0, misconception_probability=0.5, wrong_step_probability=0.02, num_free_tokens=1
    )
    wrong = 0
    for row in rows:
        positions = [row["prompt"][0]]
        for key in re.findall("[a-z]([A-Z])", row["prompt"]):
            positions.append(moves()[key, positions[-1]])
        steps = re.findall(r"[a-z][A-Z][^\w]([1-5])([+-])", row["demonstration"])
        assert len(steps) == len(positions) - 1
        for (position, check), right in zip(steps, positions[1:], strict=True):
            assert (check == "+") == (position == right)
            wrong += check == "-"
    assert wrong > 300


def test_missed_checks_say_right_of_wrong_steps_and_never_wrong_of_right_ones() -> None:
    made = partial(checked_steps, 300, seed=0, misconception_probability=0.5)
    true, none = made(missed_check_probability=0.0), made(missed_check_probability=1.0)
    assert sum(row["demonstration"].count("-") for row in true) > 300
    assert not any("-" in row["demonstration"] for row in none)
    wrong, missed = 0, 0
    for row in made(missed_check_probability=0.5):
        positions = [row["prompt"][0]]
        for key in re.findall("[a-z]([A-Z])", row["prompt"]):
            positions.append(moves()[key, positions[-1]])
        steps = re.findall(r"[a-z][A-Z]([1-5])([+-])", row["demonstration"])
        for (position, check), right in zip(steps, positions[1:], strict=True):
            assert check == "+" or position != right, "a right step is never called wrong"
            wrong += position != right
            missed += position != right and check == "+"
    assert wrong > 600
    assert 0.45 * wrong < missed < 0.55 * wrong


def test_misconceptions_alone_are_always_the_same_wrong_move() -> None:
    for row in checked_steps(200, seed=1, misconception_probability=1.0):
        before = row["prompt"][0]
        for key, position in re.findall(r"[a-z]([A-Z])([1-5])", row["demonstration"]):
            assert position == misconceptions().get((key, before), moves()[key, before])
            before = position


def test_the_share_of_hard_keys_differs_between_problems() -> None:
    shares = []
    for row in checked_steps(300, seed=0, min_steps=14, max_steps=14):
        keys = re.findall("[a-z]([A-Z])", row["prompt"])
        shares.append(sum(key in HARD_KEYS for key in keys) / len(keys))
    assert sum(share < 0.2 for share in shares) > 30
    assert sum(share > 0.8 for share in shares) > 30


def test_some_answers_are_early() -> None:
    rows = checked_steps(300, seed=0, early_stop_probability=0.1)
    early = [row for row in rows if row["demonstration"].count("+") < len(row["prompt"]) // 2 - 1]
    assert 100 < len(early) < 280


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_steps": 9, "max_steps": 3}, "options.min_steps is 9, above options.max_steps, 3"),
        ({"misconception_probability": 1.5}, "options.misconception_probability is 1.5"),
        ({"num_free_tokens": -1}, "options.num_free_tokens is -1"),
    ],
)
def test_an_option_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate("checked_steps", options)


@pytest.mark.parametrize(
    ("response", "last"),
    [
        ("", "start on 1 of 3"),
        ("a", "label on 1 of 3"),
        ("b", "label off"),
        ("aA", "key on 1 of 3"),
        ("aB", "key off"),
        ("aA:", "free on 1 of 3"),
        ("aA2", "position on 0 of 2"),
        ("aA1", "position off"),
        ("aA1-", "check off"),
        ("aA2+;", "semicolon on of 2"),
        ("aA1-;", "semicolon off of 2"),
        ("aA2+bD4+cG5+;", "semicolon on of 0"),
        ("aA2+bD4+cG5+;5", "right"),
        ("aA2+bD4+cG5+;55", "right"),
        ("aA2+;2", "wrong"),
        ("aA1-bD1-cG5", "position on 0 of 0"),  # right again, by chance
        ("aA2+bD4+cG5+dA5", "position off"),  # a step too many
    ],
)
def test_the_state_of_a_prefix(response: str, last: str) -> None:
    states = oracle_states(PROBLEM, response)
    assert states is not None
    assert len(states) == len(response) + 1
    assert states[-1] == last


def test_no_problem_of_the_task() -> None:
    assert oracle_states("3a12b45c31=", "a3") is None
