"""A procedural task for an environment of many turns: pulls at a rope, in which luck plays a
part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from random import Random
from string import ascii_lowercase

from vapo.tasks import Row, check_range, check_shares

KEYS = "1234"
PLACES = "ABCDEFGHIJKLMNOPQRSTUVWXY"
MIDDLE = len(PLACES) // 2
LUCK = 2 / 3
DIGITS = 6
MAX_TURNS = 1000


@cache
def right_keys() -> Mapping[str, str]:
    """Return the right key for each sign."""
    rng = Random("tug_of_war/keys")
    return {sign: rng.choice(KEYS) for sign in ascii_lowercase}


@cache
def habits() -> Mapping[str, str]:
    """Return the keys that habit may press for each sign: all for a to m, a wrong one for n to
    z."""
    rng = Random("tug_of_war/habits")
    return {
        sign: rng.choice(KEYS.replace(key, "")) if sign >= "n" else KEYS
        for sign, key in right_keys().items()
    }


class Tug:
    """One game: the rope's position, and the sign, a letter that decides the right key.

    The luck of a turn and the next sign depend on the game's number and on all keys so far.
    """

    def __init__(self, number: str, num_turns: int) -> None:
        self._history, self._num_turns = f"tug_of_war/game/{number}/", num_turns
        self.place, self.num_played = MIDDLE, 0
        self.sign = Random(self._history).choice(ascii_lowercase)

    @property
    def observation(self) -> str:
        """The text that the policy reads before a turn: the sign, and the position of the rope."""
        return f"{self.sign}{PLACES[self.place]}"

    @property
    def has_ended(self) -> bool:
        return self.num_played == self._num_turns

    @property
    def is_won(self) -> bool:
        return self.place > MIDDLE

    def press(self, key: str) -> None:
        """Play a turn with a key. A text that is not a key counts as a wrong key."""
        self._history += key if key in set(KEYS) else "-"
        rng = Random(self._history)
        share = LUCK if key == right_keys()[self.sign] else 1 - LUCK
        step = 2 if 2 * self.num_played < self._num_turns else 1
        place = self.place + (step if rng.random() < share else -step)
        self.place = min(max(place, 0), len(PLACES) - 1)
        self.num_played += 1
        self.sign = rng.choice(ascii_lowercase)


def tug_of_war(
    num_examples: int, *, seed: int, num_turns: int = 20, habit_probability: float = 0.0
) -> list[Row]:
    """Generate games in which a rope is to be pulled beyond the middle of its places, A to Y.

    `018273:qM` means: game 018273, the sign is q, and the rope is at M, the middle. Of four keys, 1
    to 4, one is right for each sign, always the same, which only demonstrations show. The right key
    moves the rope towards Y with probability 2/3, any other key with probability 1/3; otherwise the
    rope moves towards A. It moves by two positions in the first half of the turns and by one in the
    second, and stays between A and Y. A game is won if it ends beyond M: one reward after many
    decisions and much luck, while each observation shows how the game stands. Signs and luck depend
    on the game's number, which is the row's answer, and on the keys so far: two games of one number
    differ from the first key on in which they differ.

    A demonstration is the list of the keys that are pressed. They are the right ones, or with
    `habit_probability`, drawn for each turn, a key that habit presses: any key for the signs a to
    m, a wrong one for n to z.

    Raises: UserError: an option is out of range.

    >>> row = tug_of_war(1, seed=0)[0]
    >>> row["prompt"], row["demonstration"][:3]
    ('957529:zM', ['1', '2', '3'])
    """
    check_range("num_turns", num_turns, low=1, high=MAX_TURNS)
    check_shares(habit_probability=habit_probability)
    rows = []
    for index in range(num_examples):
        number = f"{Random(f'tug_of_war/number/{seed}/{index}').randrange(10**DIGITS):0{DIGITS}d}"
        game = Tug(number, num_turns)
        problem, turns = f"{number}:{game.observation}", list[str]()
        rng = Random(f"tug_of_war/demonstration/{seed}/{index}")
        while not game.has_ended:
            is_habit = rng.random() < habit_probability
            keys = habits()[game.sign] if is_habit else right_keys()[game.sign]
            turns.append(rng.choice(keys))
            game.press(turns[-1])
        rows.append({"prompt": problem, "answer": number, "demonstration": turns})
    return rows
