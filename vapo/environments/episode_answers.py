"""What the process of one episode does: it asks the environment, and checks what that returns."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, Protocol

from vapo.system.process_protocol import reward_problem
from vapo.system.shown_text import beginning

MAX_OBSERVATION_CHARS = 2**18
"""A longer observation is a failure of its episode: it is no text for a policy to read."""


class Episode(Protocol):
    """An environment in one episode: a user's own object, or an adapter's. May have `close()`."""

    def reset(self, row: dict[str, Any]) -> str | None: ...

    def step(self, text: str) -> tuple[str | None, float]: ...


MakeEpisode = Callable[[], Episode]


class EpisodeAnswers:
    """Answers `("reset", row)` and then each `("step", text)`; see `Answering`."""

    def __init__(self, make: MakeEpisode) -> None:
        self._make = make
        self._episode: Any = None

    def __call__(self, question: tuple[str, Any]) -> dict[str, Any]:
        asked, argument = question
        if asked == "step":
            return _step_reply(self._episode.step(argument))
        _seed(argument.get("seed"))
        self._episode = self._make()
        return _checked(self._episode.reset(argument) or "", 0.0)

    def close(self) -> None:
        """Call the environment's own `close()`."""
        close = getattr(self._episode, "close", None)
        if callable(close):
            close()


def _seed(seed: Any) -> None:
    """Make what the environment draws a function of the row; a fork has its host's state."""
    seed = seed if isinstance(seed, int) else 0
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _step_reply(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        return {
            "failure": "error: step(text) must return (observation or None, reward), it returned "
            f"{beginning(repr(answer), 80)}"
        }
    return _checked(*answer)


def _checked(observation: Any, reward: Any) -> dict[str, Any]:
    if observation is not None and not isinstance(observation, str):
        return {"failure": f"error: an observation is text, this is {type(observation).__name__}"}
    if observation is not None and len(observation) > MAX_OBSERVATION_CHARS:
        return {
            "failure": f"error: an observation of {len(observation)} characters; at most "
            f"{MAX_OBSERVATION_CHARS} are taken"
        }
    if isinstance(reward, (str, bytes)):
        return {
            "failure": f"error: a reward is a finite number, this is {beginning(repr(reward), 80)}"
        }
    number = float(reward)
    if (problem := reward_problem(number)) is not None:
        return {"failure": f"error: {problem}"}
    return {"observation": observation, "reward": number}
