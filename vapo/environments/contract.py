"""What answers the turns of many episodes: asked without waiting, replies taken as they come.

A verifier is an environment of one turn: it says nothing at first, and its reply to the response is
a verdict, with which the episode ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from vapo.types import Prompt, Rollout, VerifierVerdict

EpisodeKey = tuple[int, ...]
"""Names an episode among those that are open."""


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgement of one response and the reward of it, on its way to its rollout.

    `reward` is the configured value (shaping is added later, see `rewards.overlong`); the other
    fields are those of the rollout.
    """

    is_correct: bool
    reward: float
    extracted: str | None = None
    failure: str | None = None
    by_verifier: Mapping[str, VerifierVerdict] = field(default_factory=dict)

    def on(self, rollout: Rollout) -> Rollout:
        """The response with this verdict, whose reward is that of its turn."""
        (turn,) = rollout.turns
        return replace(
            rollout,
            turns=(replace(turn, reward=self.reward),),
            is_correct=self.is_correct,
            extracted=self.extracted,
            failure=self.failure,
            by_verifier=self.by_verifier,
        )


@dataclass(frozen=True)
class Reply:
    """What came of one `reset` or `step`.

    `observation` None: the episode has ended. `failure` names why there is no answer (timeout,
    crash, garbled, error: ...): the episode has ended there, and what it would have earned is not
    known. `verdict` is a verifier's, which may itself have failed: then the response counts as
    incorrect.
    """

    key: EpisodeKey
    observation: str | None = None
    reward: float = 0.0
    failure: str | None = None
    verdict: Verdict | None = None


class Environments(Protocol):
    """Answers the turns of episodes, each of which waits for no other.

    An episode has one open question at a time. Nothing here raises for what an environment does:
    that is a `Reply` with a `failure`.
    """

    def reset(self, key: EpisodeKey, prompt: Prompt) -> None:
        """Begin an episode on a row of the data."""

    def step(self, key: EpisodeKey, text: str, *, has_ended: bool = True) -> None:
        """Give the episode what the policy wrote in its turn.

        Args:
            has_ended: whether the policy ended it; only of `gives_verdicts` others are asked for.
        """

    def end(self, key: EpisodeKey) -> None:
        """The episode is over, or given up; ended and unknown ones are ignored."""

    def poll(self, timeout_s: float) -> list[Reply]:
        """The replies that have come; waits at most so long for the first, 0: not at all."""

    @property
    def gives_verdicts(self) -> bool:
        """Whether an episode is one turn, and the reply to it a verdict."""

    @property
    def capacity(self) -> int:
        """How many episodes may be open at a time."""

    def close(self) -> None:
        """End everything that was started; a second call does nothing."""
