"""The negative control `rewards.shuffle`: rewards without a relation to the responses."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from vapo.environments.contract import Verdict
from vapo.types import Rollout


def with_shuffled_verdicts(rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
    """The rollouts with each other's verdicts, of all sources together."""
    dealt = [Verdict(bool(r.is_correct), r.reward, r.extracted, r.failure) for r in rollouts]
    Random(f"shuffle/{seed}").shuffle(dealt)
    return [verdict.on(rollout) for verdict, rollout in zip(dealt, rollouts, strict=True)]
