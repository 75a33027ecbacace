"""Rollouts that hold only what a verifier reads."""

from __future__ import annotations

from typing import Any

from vapo.config.kinds import make
from vapo.config.schema import RewardConfig
from vapo.rewards.scorer import Scorer
from vapo.types import FinishReason, Prompt, Rollout, Turn

HOSTILE = "tests.rewards.hostile_verifiers"


def rollout(text: str, answer: str = "42", **metadata: Any) -> Rollout:
    prompt = Prompt("p", "problem", (1,), answer, metadata=metadata)
    return Rollout(prompt, (1,), text, (0.0,), FinishReason.STOP, (Turn(0, 1),))


def scorer(verifier: str, **fields: Any) -> Scorer:
    return Scorer(make(RewardConfig, verifier=verifier, **fields), max_response_tokens=100)


def hostile(function: str, **fields: Any) -> Scorer:
    return scorer("python", function=f"{HOSTILE}:{function}", **fields)
