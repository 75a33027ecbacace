"""Rollouts that hold only what a verifier reads, and the scorers that judge them."""

from __future__ import annotations

from typing import Any

from vapo.config.kinds import make
from vapo.config.schema import DataConfig, FitConfig, RewardConfig
from vapo.rewards.scorer import VerifierScorer
from vapo.types import FinishReason, Prompt, Rollout, Turn

HOSTILE = "tests.rewards.hostile_verifiers"


def rollout(text: str, answer: str = "42", **metadata: Any) -> Rollout:
    prompt = Prompt("p", "problem", (1,), answer, metadata=metadata)
    return Rollout(prompt, (1,), text, (0.0,), FinishReason.STOP, (Turn(0, 1),))


def scorer_of(
    rewards: RewardConfig, *, max_response_tokens: int, data: DataConfig | None = None
) -> VerifierScorer:
    config = FitConfig(rewards=rewards, data=data or DataConfig())
    config.rollouts.max_response_tokens = max_response_tokens
    return VerifierScorer(config)


def scorer(verifier: str, **fields: Any) -> VerifierScorer:
    return scorer_of(make(RewardConfig, verifier=verifier, **fields), max_response_tokens=100)


def hostile(function: str, **fields: Any) -> VerifierScorer:
    return scorer("python", function=f"{HOSTILE}:{function}", **fields)
