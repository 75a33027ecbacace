"""Wraps verifiers as environments with a single turn, in which the response is the only action."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from vapo.environments.contract import EpisodeKey, Reply, Verdict
from vapo.types import FinishReason, Prompt, Rollout

OnVerdict = Callable[[Verdict], None]


class Verifiers(Protocol):
    """Interface of verifiers that judge a submitted rollout, as `scorer.VerifierScorer` does."""

    def submit(
        self, rollout: Rollout, on_verdict: OnVerdict, *, num_responses: int | None = None
    ) -> Callable[[], object]: ...

    def poll(self, timeout_s: float) -> None: ...


class JudgedResponses:
    """Verifiers as `Environments` with a single turn, so that responses are judged during sampling.

    A response that was cut is judged, too. Any number of episodes may be open at a time: they wait
    until a process is free. `close` withdraws their questions and leaves the verifiers open for
    others.
    """

    gives_verdicts = True
    capacity = sys.maxsize

    def __init__(self, scorer: Verifiers, num_responses: int | None = None) -> None:
        self._scorer, self._num_responses = scorer, num_responses
        self._prompts: dict[EpisodeKey, Prompt] = {}
        self._withdrawals: dict[EpisodeKey, Callable[[], object]] = {}
        self._replies: list[Reply] = []

    def reset(self, key: EpisodeKey, prompt: Prompt) -> None:
        self._prompts[key] = prompt
        self._replies.append(Reply(key, observation=""))

    def step(self, key: EpisodeKey, text: str, *, has_ended: bool = True) -> None:
        reason = FinishReason.STOP if has_ended else FinishReason.LENGTH
        response = Rollout(self._prompts[key], (), text, (), reason)
        self._withdrawals[key] = self._scorer.submit(
            response,
            lambda verdict: self._replies.append(Reply(key, verdict=verdict)),
            num_responses=self._num_responses,
        )

    def end(self, key: EpisodeKey) -> None:
        self._prompts.pop(key, None)
        if (withdraw := self._withdrawals.pop(key, None)) is not None:
            withdraw()

    def poll(self, timeout_s: float) -> list[Reply]:
        self._scorer.poll(0.0 if self._replies else timeout_s)
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        for key in list(self._withdrawals):
            self.end(key)
