"""The environment of `conf/tug_of_war/vapo.yaml`: a rope, pulled with luck, one key a turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vapo.tasks.tug_of_war import Tug


class TugOfWar:
    """Takes a key each turn and says which sign comes next and where the rope is: `kP`.

    1 is earned where the rope is beyond the middle after the last turn, nothing otherwise.
    """

    def __init__(self, num_turns: int = 20) -> None:
        self.num_turns = num_turns

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin with a row of the data. The prompt says it all: there is nothing to add."""
        self.game = Tug(row["answer"], self.num_turns)
        return ""

    def step(self, text: str) -> tuple[str | None, float]:
        """Press a key; None: the episode has ended."""
        self.game.press(text)
        if self.game.has_ended:
            return None, float(self.game.is_won)
        return self.game.observation, 0.0
