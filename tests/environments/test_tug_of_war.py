"""Tugs of war: the rules of a game, its demonstrations, and the environment that plays it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from experiments.environments.tug_of_war import TugOfWar
from vapo.errors import UserError
from vapo.tasks.tug_of_war import KEYS, MIDDLE, PLACES, Tug, habits, right_keys, tug_of_war


def play(number: str, keys: list[str], num_turns: int = 20) -> list[tuple[str | None, float]]:
    environment = TugOfWar(num_turns)
    assert environment.reset({"prompt": "", "answer": number}) == ""
    return [environment.step(key) for key in keys]


def places(number: str, keys: list[str], num_turns: int = 20) -> list[int]:
    """Where the rope is before each turn and after the last."""
    game = Tug(number, num_turns)
    found = [game.place]
    for key in keys:
        game.press(key)
        found.append(game.place)
    return found


def test_the_rope_moves_by_two_and_in_the_second_half_by_one() -> None:
    found = places("000001", list("1234123412"), num_turns=10)
    assert found[0] == MIDDLE
    steps = [abs(b - a) for a, b in pairwise(found)]
    assert steps == [2] * 5 + [1] * 5


def test_the_rope_stays_between_its_ends() -> None:
    for number in map(str, range(40)):
        assert all(0 <= place < len(PLACES) for place in places(number, ["x"] * 40, num_turns=40))
    assert min(places("3", ["x"] * 40, num_turns=40)) == 0


@pytest.mark.parametrize(("is_right", "share"), [(True, 2 / 3), (False, 1 / 3)])
def test_the_right_key_pulls_in_two_of_three_cases(is_right: bool, share: float) -> None:
    """3,000 first turns: a standard error of 0.009."""
    pulled = 0
    for number in map(str, range(3000)):
        game = Tug(number, 20)
        right = right_keys()[game.sign]
        game.press(right if is_right else KEYS.replace(right, "")[0])
        pulled += game.place > MIDDLE
    assert pulled / 3000 == pytest.approx(share, abs=0.03)


def test_games_of_one_number_part_with_the_first_other_key() -> None:
    assert play("7", list("1111")) == play("7", list("1111"))
    parted = [play(str(n), list("1211")) != play(str(n), list("1111")) for n in range(20)]
    assert sum(parted) > 15
    assert play("7", list("12"))[0] == play("7", list("11"))[0]
    for text in ("", "12", "no key"):
        assert play("7", [text, "1"]) == play("7", ["-", "1"])
    assert len({tuple(places(str(n), [""] * 8)) for n in range(9)}) > 4
    assert len(set(play("5", [""] * 8))) > 3, "an empty turn is not the same draw again"


def test_one_reward_for_a_rope_beyond_the_middle() -> None:
    rewards = set()
    for number in map(str, range(30)):
        *before, (last, reward) = play(number, ["1"] * 5, num_turns=5)
        assert all(len(shown or "") == 2 and earned == 0 for shown, earned in before)
        assert last is None
        assert reward == float(places(number, ["1"] * 5, num_turns=5)[-1] > MIDDLE)
        rewards.add(reward)
    assert rewards == {0.0, 1.0}


def test_a_demonstration_is_the_right_keys_of_a_game() -> None:
    for row in tug_of_war(20, seed=0, num_turns=6):
        number, _, shown = row["prompt"].partition(":")
        assert (number, len(row["demonstration"])) == (row["answer"], 6)
        game = Tug(number, 6)
        assert shown == game.observation
        for key in row["demonstration"]:
            assert key == right_keys()[game.sign]
            game.press(key)


def test_habit_presses_any_key_or_one_that_is_wrong() -> None:
    assert all(keys == KEYS for sign, keys in habits().items() if sign < "n")
    assert all(keys not in ("", right_keys()[s]) for s, keys in habits().items() if s >= "n")
    right = total = 0
    for row in tug_of_war(200, seed=1, habit_probability=0.5):
        game = Tug(row["answer"], 20)
        for key in row["demonstration"]:
            if game.sign >= "n":
                right, total = right + (key == right_keys()[game.sign]), total + 1
                assert key in (right_keys()[game.sign], habits()[game.sign])
            game.press(key)
    assert right / total == pytest.approx(0.5, abs=0.05)


def test_rows_depend_on_the_seed_and_their_place_alone() -> None:
    assert tug_of_war(30, seed=5)[:10] == tug_of_war(10, seed=5)
    assert {r["prompt"] for r in tug_of_war(30, seed=5)}.isdisjoint(
        r["prompt"] for r in tug_of_war(30, seed=6)
    )
    plain, noisy = tug_of_war(10, seed=5), tug_of_war(10, seed=5, habit_probability=1.0)
    assert [r["prompt"] for r in plain] == [r["prompt"] for r in noisy]


@pytest.mark.parametrize(
    "options", [{"num_turns": 0}, {"habit_probability": 1.1}, {"habit_probability": -0.1}]
)
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"options.{next(iter(options))} is"):
        tug_of_war(1, seed=0, **options)  # type: ignore[arg-type]
