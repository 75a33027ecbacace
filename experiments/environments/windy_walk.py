"""The environment of `conf/windy_walk/vapo.yaml`: a walk to a place, in a wind that is hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEPS = {f"{sign}{size}": int(f"{sign}{size}") for size in (1, 5, 20) for sign in "+-"}


class WindyWalk:
    """Takes a step each turn, `+5` or `-20`, and says what is left to go: `37>63=`.

    Steps of 20 are carried by the wind, which is the row's answer. 1 is earned at the target,
    nothing otherwise. The episode ends there, or after `max_turns`. What is no step is no move.
    """

    def __init__(self, max_turns: int = 8) -> None:
        self.num_left = max_turns

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin with a row of the data. The prompt says it all: there is nothing to add."""
        self.place, self.target = map(int, row["prompt"].rstrip("=").split(">"))
        self.wind = int(row["answer"])
        return ""

    def step(self, text: str) -> tuple[str | None, float]:
        """Take a step; None: the episode has ended."""
        self.num_left -= 1
        step = STEPS.get(text, 0)
        self.place += step + (self.wind if abs(step) == 20 else 0)
        self.place = min(max(self.place, 0), 99)
        if self.place == self.target or self.num_left == 0:
            return None, float(self.place == self.target)
        return f"{self.place:02d}>{self.target:02d}=", 0.0
