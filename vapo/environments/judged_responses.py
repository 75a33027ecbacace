"""Verifiers as environments of one turn: a response is judged while others are sampled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

from vapo.environments.contract import EpisodeKey, Reply, Verdict
from vapo.types import FinishReason, Prompt, Rollout

OnVerdict = Callable[[Verdict], None]


class Verifiers(Protocol):
    """Judge responses in processes of their own, or together where they need the device."""

    def submit(
        self, rollout: Rollout, on_verdict: OnVerdict, *, num_responses: int | None = None
    ) -> Callable[[], object]:
        """Ask for a verdict, which `pump` hands out; what is returned withdraws the question."""
        ...

    def pump(self, timeout_s: float) -> None:
        """Hand out the verdicts that have come; waits at most so long for the first."""
        ...


class JudgedResponses:
    """See `Environments`. It says nothing before a response, and its reply to it is the verdict.

    A response that was cut is judged, too. All may be open at a time: those that no process judges
    yet wait.

    Args:
        num_responses: see `Scorer.environments`.
    """

    gives_verdicts = True
    capacity = sys.maxsize

    def __init__(self, verifiers: Verifiers, num_responses: int | None = None) -> None:
        self._verifiers, self._num_responses = verifiers, num_responses
        self._prompts: dict[EpisodeKey, Prompt] = {}
        self._asked: dict[EpisodeKey, Callable[[], object]] = {}
        self._replies: list[Reply] = []

    def reset(self, key: EpisodeKey, prompt: Prompt) -> None:
        """See `Environments.reset`."""
        self._prompts[key] = prompt
        self._replies.append(Reply(key, observation=""))

    def step(self, key: EpisodeKey, text: str, *, has_ended: bool = True) -> None:
        """See `Environments.step`."""
        reason = FinishReason.STOP if has_ended else FinishReason.LENGTH
        response = Rollout(self._prompts[key], (), text, (), reason)
        self._asked[key] = self._verifiers.submit(
            response, partial(self._take, key), num_responses=self._num_responses
        )

    def _take(self, key: EpisodeKey, verdict: Verdict) -> None:
        self._replies.append(Reply(key, verdict=verdict))

    def end(self, key: EpisodeKey) -> None:
        """See `Environments.end`."""
        self._prompts.pop(key, None)
        if (withdraw := self._asked.pop(key, None)) is not None:
            withdraw()

    def poll(self, timeout_s: float) -> list[Reply]:
        """See `Environments.poll`."""
        self._verifiers.pump(0.0 if self._replies else timeout_s)
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """Withdraw what is asked. The verifiers stay: others may ask them."""
        for key in list(self._asked):
            self.end(key)
