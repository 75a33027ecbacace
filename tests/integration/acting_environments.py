"""Environments of the runs of test_episode_runs.py, whose processes import this file."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Hostile:
    """Plays three turns; of twelve episodes one hangs, one crashes and one floods its reader."""

    def __init__(self, num_turns: int) -> None:
        self.num_left = 3

    def reset(self, row: Mapping[str, Any]) -> str:
        self.what = random.Random().choice(["hang", "crash", "flood", *["fair"] * 9])
        return "kM\x00\x1b[2J"

    def step(self, text: str) -> tuple[str | None, float]:
        self.num_left -= 1
        if self.num_left == 1 and self.what == "hang":
            time.sleep(1000)
        if self.num_left == 1 and self.what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.num_left == 1 and self.what == "flood":
            return "x" * 2**20, 0.0
        return ("\ud800", 0.0) if self.num_left else (None, float(random.random() < 0.5))


class Broken:
    def __init__(self, num_turns: int) -> None: ...

    def reset(self, row: Mapping[str, Any]) -> str:
        raise ValueError("no such place")

    def step(self, text: str) -> tuple[str | None, float]:
        return None, 0.0


class Slow:
    """The example's environment, in which each answer takes a moment and a rope at I is lost."""

    def __init__(self, num_turns: int) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from experiments.environments.tug_of_war import TugOfWar

        self.tug = TugOfWar(num_turns)

    def reset(self, row: Mapping[str, Any]) -> str:
        return self.tug.reset(row)

    def step(self, text: str) -> tuple[str | None, float]:
        time.sleep(0.05)
        observation, reward = self.tug.step(text)
        is_lost = observation is not None and observation[1] <= "I"
        return (None, 0.0) if is_lost else (observation, reward)
