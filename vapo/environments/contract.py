"""The interface of environments, which answer the turns of many episodes without blocking.

A verifier is an environment of one turn. Its first observation is empty, and its reply to the
response is a verdict, which ends the episode.
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
    """A verifier's judgement of one response, and the response's reward.

    `reward` is the configured value (shaping is added later, see `rewards.overlong`); the other
    fields are those of the rollout.
    """

    is_correct: bool
    reward: float
    extracted: str | None = None
    failure: str | None = None
    by_verifier: Mapping[str, VerifierVerdict] = field(default_factory=dict)

    def on(self, rollout: Rollout) -> Rollout:
        """Return the response with this verdict. The reward is put on its one turn."""
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
    """The answer to one `reset` or `step`.

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

    An episode has one open question at a time. No method raises for what an environment does wrong:
    that becomes a `Reply` with a `failure`.
    """

    def reset(self, key: EpisodeKey, prompt: Prompt) -> None:
        """Begin an episode on a row of the data."""

    def step(self, key: EpisodeKey, text: str, *, has_ended: bool = True) -> None:
        """Give the episode what the policy wrote in its turn.

        Args:
            has_ended: whether the policy ended the turn. A turn that was cut off is given only to
                environments that give verdicts (`gives_verdicts`).
        """

    def end(self, key: EpisodeKey) -> None:
        """End an episode. Episodes that have ended or are not known are ignored."""

    def poll(self, timeout_s: float) -> list[Reply]:
        """Return the replies that have come. Wait at most `timeout_s` for the first."""

    @property
    def gives_verdicts(self) -> bool:
        """Whether an episode is one turn, and the reply to it a verdict."""

    @property
    def capacity(self) -> int:
        """How many episodes may be open at a time."""

    def close(self) -> None:
        """End everything that was started; a second call does nothing."""
