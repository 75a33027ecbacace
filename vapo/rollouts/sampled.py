"""An iteration's rollouts, with what they were sampled for."""

from __future__ import annotations

from dataclasses import dataclass

from vapo.types import Phase, RolloutBatch


@dataclass(frozen=True)
class SampledRollouts:
    """An iteration's rollouts, the phase that they were sampled for, and the policy's age.

    `policy_iterations` counts those before the oldest weights that sampled any of them.
    """

    iteration: int
    policy_iterations: int
    phase: Phase
    batch: RolloutBatch
    metrics: dict[str, float]
