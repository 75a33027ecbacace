"""The interface of environments, which reply to the turns of many episodes without blocking.

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

    Attributes:
        is_correct: whether the response is correct; False if the verifier failed.
        reward: the reward before shaping, which is added later (see `rewards.overlong`).
        extracted: the answer that the verifier read; None if it read none.
        failure: why the verifier failed, such as `timeout` or `crash`; None if it did not fail.
        by_verifier: the verdict of each of several verifiers, by name; empty with one verifier.
    """

    is_correct: bool
    reward: float
    extracted: str | None = None
    failure: str | None = None
    by_verifier: Mapping[str, VerifierVerdict] = field(default_factory=dict)

    def on(self, rollout: Rollout) -> Rollout:
        """Return the rollout with this verdict. The reward is set on its only turn."""
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
    """An environment's reply to one `reset` or `step` of an episode.

    If `observation` is None, the episode has ended. `failure` names why there is no answer
    (timeout, crash, garbled, error: ...): the episode has then ended, and its return is not known.
    `verdict` is a verifier's, which may itself have failed; the response then counts as incorrect.
    """

    key: EpisodeKey
    observation: str | None = None
    reward: float = 0.0
    failure: str | None = None
    verdict: Verdict | None = None


class Environments(Protocol):
    """The interface of environments: many episodes at once, none of which waits for another.

    `reset` and `step` ask an episode, which has one open question at a time; `poll` returns the
    replies. No method raises for what an environment does wrong: that becomes a `Reply` with a
    `failure`.
    """

    def reset(self, key: EpisodeKey, prompt: Prompt) -> None:
        """Begin an episode for a prompt, which is a row of the data."""

    def step(self, key: EpisodeKey, text: str, *, has_ended: bool = True) -> None:
        """Send an episode the text that the policy wrote in its turn.

        Args:
            has_ended: whether the policy ended the turn. A turn that was cut off is sent only to
                environments that give verdicts (`gives_verdicts`).
        """

    def end(self, key: EpisodeKey) -> None:
        """End an episode. One that has ended or is not known is ignored."""

    def poll(self, timeout_s: float) -> list[Reply]:
        """Return the replies that have come. Wait at most `timeout_s` for the first."""

    @property
    def gives_verdicts(self) -> bool:
        """Whether each episode has one turn, and the reply to it is a verdict."""

    @property
    def capacity(self) -> int:
        """The largest number of episodes that may be open at a time."""

    def close(self) -> None:
        """End all processes that were started. A second call does nothing."""
