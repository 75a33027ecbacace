"""Rollouts that hold only what a verifier reads, and a scorer that judges a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vapo.config.kinds import make
from vapo.config.schema import DataConfig, FitConfig, RewardConfig
from vapo.environments.contract import Verdict
from vapo.rewards.scorer import Scorer
from vapo.rewards.text_judge import WAIT_S
from vapo.types import FinishReason, Prompt, Rollout, Turn

HOSTILE = "tests.rewards.hostile_verifiers"


class BatchScorer(Scorer):
    """As the loop of a run asks it, without an engine."""

    def __init__(
        self, rewards: RewardConfig, *, max_response_tokens: int, data: DataConfig | None = None
    ) -> None:
        config = FitConfig(rewards=rewards, data=data or DataConfig())
        config.rollouts.max_response_tokens = max_response_tokens
        super().__init__(config)

    def score(
        self, rollouts: Sequence[Rollout], *, advance: Callable[[int], None] = lambda n: None
    ) -> list[Rollout]:
        """The rollouts with their verdicts; `advance(n)` reports n more as done."""
        found: dict[int, Verdict] = {}

        def on_verdict(row: int, verdict: Verdict) -> None:
            found[row] = verdict
            advance(1)

        withdrawals = [
            self.submit(rollout, partial(on_verdict, row)) for row, rollout in enumerate(rollouts)
        ]
        try:
            while len(found) < len(rollouts):
                self.pump(WAIT_S)
        finally:
            for withdraw in withdrawals:
                withdraw()
        judged = [found[row].on(rollout) for row, rollout in enumerate(rollouts)]
        self.check(judged)
        return judged


def rollout(text: str, answer: str = "42", **metadata: Any) -> Rollout:
    prompt = Prompt("p", "problem", (1,), answer, metadata=metadata)
    return Rollout(prompt, (1,), text, (0.0,), FinishReason.STOP, (Turn(0, 1),))


def scorer(verifier: str, **fields: Any) -> BatchScorer:
    return BatchScorer(make(RewardConfig, verifier=verifier, **fields), max_response_tokens=100)


def hostile(function: str, **fields: Any) -> BatchScorer:
    return scorer("python", function=f"{HOSTILE}:{function}", **fields)
