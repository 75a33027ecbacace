"""Rollouts that carry the verdicts that a test wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vapo.config.rewards import RewardConfig
from vapo.environments.contract import Verdict
from vapo.rollouts.batch import make_rollout_batch
from vapo.types import Rollout, RolloutBatch, Turn


def judged(rollouts: Sequence[Rollout], verdicts: Iterable[Verdict]) -> list[Rollout]:
    return [with_verdict(r, verdict) for r, verdict in zip(rollouts, verdicts, strict=True)]


def judged_batch(
    rollouts: Sequence[Rollout],
    verdicts: Iterable[Verdict],
    *,
    max_response_tokens: int,
    group_size: int = 1,
    rewards: RewardConfig | None = None,
    **options: Any,
) -> RolloutBatch:
    """The batch of an iteration whose rollouts have these verdicts."""
    return make_rollout_batch(
        judged(rollouts, verdicts),
        group_size=group_size,
        rewards=rewards or RewardConfig(),
        max_response_tokens=max_response_tokens,
        **options,
    )


def with_verdict(rollout: Rollout, verdict: Verdict) -> Rollout:
    """An episode keeps its turns, whose rewards must add up to the verdict's; a response becomes
    one turn that has its reward."""
    if not rollout.in_environment:
        turn = Turn(0, len(rollout.response_ids), version=rollout.version)
        return verdict.on(replace(rollout, turns=(turn,)))
    assert abs(rollout.reward - verdict.reward) < 1e-9
    failure = verdict.failure
    is_correct, is_lost = verdict.is_correct, failure is not None
    return replace(rollout, is_correct=is_correct, failure=failure, is_lost=is_lost)


def verdict_of(rollout: Rollout) -> Verdict:
    """What was said of a rollout."""
    assert rollout.is_correct is not None
    return Verdict(rollout.is_correct, rollout.reward, rollout.extracted, rollout.failure)


def not_judged(rollout: Rollout) -> Rollout:
    """The rollout as its engine made it, of no known weights."""
    turns = tuple(replace(turn, reward=0.0, version=None) for turn in rollout.turns)
    return replace(rollout, turns=turns, is_correct=None, extracted=None, failure=None)
