"""The negative control `rewards.shuffle`: rewards without a relation to the responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from vapo.types import Rollout


def with_shuffled_verdicts(rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
    """The rollouts with each other's verdicts, of all sources together."""
    verdicts = [rollout.verdict for rollout in rollouts]
    Random(f"shuffle/{seed}").shuffle(verdicts)
    return [replace(r, verdict=verdict) for r, verdict in zip(rollouts, verdicts, strict=True)]
