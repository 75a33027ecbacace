"""The verdicts that rollouts carry."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from vapo.types import Rollout, Verdict


def verdicts_of(rollouts: Sequence[Rollout]) -> list[Verdict]:
    """The verdicts of rollouts that were played."""
    return [rollout.verdict for rollout in rollouts if rollout.verdict is not None]


def shuffled(verdicts: list[Verdict], seed: int | None) -> list[Verdict]:
    """The verdicts in another order, all sources together: the negative control `rewards.shuffle`,
    with the same rewards and no relation to the responses. None: in their own."""
    if seed is not None:
        Random(f"shuffle/{seed}").shuffle(verdicts)
    return verdicts
