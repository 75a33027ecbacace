"""Observers of an iteration: one sets the critic head's first bias, one measures true values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.credit import critic_rewards
from vapo.config import FitConfig
from vapo.diagnostics.value_truth.measure import (
    ValueTruth,
    compare_with_values,
    measure_truth,
    truth_metrics,
)
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.networks.head_layers import start_head
from vapo.rollouts.continuations import ContinuationSampler
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.player import RolloutRunner
from vapo.system.distributed import all_ranks, rank, sum_over_ranks
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.training.iteration import Observer, is_due
from vapo.training.module import VapoModule
from vapo.types import EvaluatedBatch, IterationStart, Phase, RolloutBatch


@dataclass
class HeadStart(Observer):
    """Sets the critic's first value to the mean reward of the run's first rollout batch, over all
    ranks (`critic.head.start` first_batch).

    It does so before the first values are computed. A resumed run never does it again, because a
    checkpoint is written after an iteration.
    """

    module: VapoModule
    progress: Progress

    def sampled(
        self, batch: RolloutBatch, start: IterationStart, player: RolloutRunner | None
    ) -> dict[str, float]:
        critic = self.module.critic
        if start.number != 1 or critic is None:
            return {}
        mean = mean_over_ranks(critic_rewards(batch, self.module.config)[~batch.is_lost])
        value = start_head(critic, mean)
        range_note = (
            "" if math.isclose(value, mean) else f", held inside the head's range at {value:.4f}"
        )
        self.progress.note(
            f"critic.head.start first_batch: the head has weight 0, and its bias is that of the "
            f"mean reward of the first rollout batch, {mean:.4f}{range_note}"
        )
        return {"critic/head_start_mean_reward": mean, "critic/head_start_value": value}


@dataclass
class ValueTruths(Observer):
    """Measures the true values of prefixes of rollouts, by sampling continuations (`value_truth`).

    Attributes:
        measured: the points that the iteration in training has measured, without the critic's
            values, and the number of tokens sampled for them; None: it has measured nothing.
        latest: these points with the critic's values; None: there are none.
    """

    config: FitConfig
    progress: Progress
    measured: tuple[list[TruthPoint], int] | None = None
    latest: ValueTruth | None = None

    def sampled(
        self, batch: RolloutBatch, start: IterationStart, player: RolloutRunner | None
    ) -> dict[str, float]:
        self.measured = self.latest = None
        if player is None or not self.is_due(start):
            return {}
        if not all_ranks(any(not rollout.is_lost for rollout in batch.rollouts)):
            return {}  # a process has lost all its episodes
        settings = sampling_settings(self.config.rollouts)
        self.measured = measure_truth(
            batch,
            ContinuationSampler(self.config, settings, player, self.progress.stage),
            seed=derive_seed(self.config.seed, "value truth", start.index, rank()),
            note=self.progress.note,
            groups_are_chosen=self.config.algorithm.dynamic_sampling_attempts > 0
            and start.phase is Phase.POLICY_OPTIMIZATION,
        )
        return {}

    def is_due(self, start: IterationStart) -> bool:
        """Whether this iteration measures true values. One on stored rollouts never does."""
        pretraining = self.config.components.value_pretraining
        if start.phase is Phase.VALUE_PRETRAINING and pretraining.data is not None:
            return False  # stored rollouts are perhaps of another policy, and judged elsewhere
        every_n = self.config.value_truth.every_n_iterations
        return is_due(self.config, start, every_n, ends_phase=False)

    def evaluated(self, batch: EvaluatedBatch, start: IterationStart) -> dict[str, float]:
        if self.measured is None:
            return {}
        seed = derive_seed(self.config.seed, "value truth's intervals", start.index)
        self.latest = compare_with_values(*self.measured, batch.old_values, self.config, seed=seed)
        return {} if self.latest is None else truth_metrics(self.latest)


def mean_over_ranks(rewards: Float[Tensor, " B"]) -> float:
    """Return the mean of the finite rewards of all ranks; 0 if there are none."""
    finite = rewards[torch.isfinite(rewards)].double()
    total, count = sum_over_ranks(
        torch.stack([finite.sum(), torch.tensor(len(finite), dtype=torch.double)])
    ).tolist()
    return total / max(count, 1.0)
