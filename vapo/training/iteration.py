"""One iteration, from prompts to minibatches: the stages in the order of the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.agreement import mask_agreement, mask_disagreement
from vapo.advantages.baselines import CriticBaseline
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.mismatch import correct_mismatch, correction_metrics
from vapo.advantages.token_rewards import critic_rewards
from vapo.advantages.value_range import check_value_targets
from vapo.config import FitConfig, resolve
from vapo.config.hyperparameters import compares_groups, mismatch_of
from vapo.diagnostics.iteration_metrics import iteration_metrics
from vapo.diagnostics.position_profiles import Profile, position_profile
from vapo.diagnostics.value_page.contents import PageContents, page_contents
from vapo.diagnostics.value_page.truth import page_truth
from vapo.diagnostics.value_truth.measure import (
    ValueTruth,
    beside_values,
    measure_truth,
    truth_metrics,
)
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.networks.critic import Critic
from vapo.networks.ensemble import start_heads
from vapo.networks.token_inputs import Layout
from vapo.rollouts.bad_rows import CheckedBatch, check_batch, first_rows
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.source import RolloutSource
from vapo.system.distributed import all_ranks, rank, sum_over_ranks
from vapo.system.seeding import derive_seed
from vapo.training.faults import Faults
from vapo.training.minibatches import Minibatch, make_minibatches
from vapo.training.schedule import common_minibatches, passes
from vapo.types import EvaluatedBatch, IterationStart, Phase, RolloutBatch, TrainingBatch


class Networks(Protocol):
    """What the stages need from actor and critic."""

    pad_id: int
    faults: Faults
    critic: Critic | None
    baseline: CriticBaseline

    @property
    def layout(self) -> Layout:
        """The layout of the inputs of both."""

    def evaluate_rollouts(
        self, batch: RolloutBatch, phase: Phase, *, with_entropy: bool
    ) -> EvaluatedBatch:
        """Add the log-probs and values that the phase needs to a batch."""


@dataclass(frozen=True)
class Iteration:
    """What an iteration trains on, and its rollouts as they were before its update."""

    start: IterationStart
    minibatches: list[Minibatch]
    metrics: dict[str, float]
    batch: TrainingBatch
    checked: CheckedBatch
    truth: ValueTruth | None = None

    @property
    def number(self) -> int:
        """1 for the first iteration of the run."""
        return self.start.number

    @property
    def phase(self) -> Phase:
        return self.start.phase

    def positions(self, config: FitConfig) -> Profile:
        """The table of values and advantages by token position. Every rank must call this."""
        return position_profile(
            self.batch,
            resolve(config),
            max_response_tokens=config.rollouts.max_response_tokens,
        )

    def page(self, config: FitConfig) -> PageContents | None:
        """The value page; None where nothing could be trained on. Every rank must call this."""
        batch = self.checked.whole_groups(self.batch)
        if self.checked.fault is not None or not all_ranks(len(batch) > 0):
            return None
        truth = None if self.truth is None else page_truth(self.truth, batch)
        return page_contents(batch, config, self.positions(config), self.start.index, truth=truth)


class IterationRunner:
    """Runs the stages of an iteration; every rank runs the same ones.

    Args:
        total: the expected number of iterations of the whole run.
        safe_point: called between stages; may raise, to stop the run.
    """

    def __init__(
        self,
        rollouts: RolloutSource,
        networks: Networks,
        *,
        total: int,
        safe_point: Callable[[], None] = lambda: None,
    ) -> None:
        self.rollouts = rollouts
        self.networks = networks
        self.total = total
        self.safe_point = safe_point
        self.config = rollouts.config
        self.progress = rollouts.progress
        self.hyperparameters = resolve(self.config)

    def run(self, start: IterationStart) -> Iteration:
        """Run one iteration: prompts, rollouts, rewards, values, advantages, minibatches."""
        self.progress.iteration(start.number, self.total, start.phase.value)
        self.safe_point()
        rollouts, metrics = self.rollouts.next_batch(start, last=self.last(start))
        self.safe_point()
        measured = self.sample_truth(rollouts, start)
        if not self.rollouts.samples_ahead:
            self.rollouts.collection.player.sampler.sleep()
        metrics |= self.start_head(rollouts, start)
        evaluated = self.evaluate(rollouts, start)
        self.safe_point()
        truth = self.truth(measured, evaluated, start)
        checked = self.check(evaluated, start)
        batch = self.estimate(checked.batch, start)
        metrics = iteration_metrics(batch, self.hyperparameters) | metrics
        metrics |= {} if truth is None else truth_metrics(truth)
        metrics |= correction_metrics(batch, mismatch_of(self.config))
        batch, masked = mask_agreement(batch, self.config.algorithm.agreement_mask_share)
        metrics |= masked
        batch, masked = mask_disagreement(batch, self.config.algorithm.disagreement_mask_share)
        metrics |= masked
        if start.phase is Phase.POLICY_OPTIMIZATION:
            metrics |= self.networks.baseline.metrics
        minibatches = self.cut(first_rows(batch, checked.num_rows), start, checked.fault)
        return Iteration(start, minibatches, metrics, batch, checked, truth)

    def start_head(self, batch: RolloutBatch, start: IterationStart) -> dict[str, float]:
        """Let the critic start at the mean of its rewards over all ranks, with
        `critic.head.start` first_batch in the run's first iteration.

        A resumed run is past it: a checkpoint is written at an iteration's end.
        """
        waits = self.config.critic.head.start == "first_batch" and start.number == 1
        if not waits or self.networks.critic is None:
            return {}
        mean = mean_over_ranks(critic_rewards(batch, self.config)[~batch.is_failed])
        value = start_heads(self.networks.critic, mean)
        held = "" if math.isclose(value, mean) else f", held inside the head's range at {value:.4f}"
        self.progress.note(
            f"critic.head.start first_batch: the head has weight 0, and its bias is that of the "
            f"mean reward of the first rollout batch, {mean:.4f}{held}"
        )
        return {"critic/head_start_mean_reward": mean, "critic/head_start_value": value}

    def sample_truth(
        self, batch: RolloutBatch, start: IterationStart
    ) -> tuple[list[TruthPoint], int] | None:
        """Sample on from prefixes of the rollouts, where `value_truth` has it due."""
        every_n = self.config.value_truth.every_n_iterations
        if every_n is None or not is_due(self.config, start, every_n, ends_phase=False):
            return None
        if self.rollouts.is_stored(start):  # perhaps of another policy, and judged elsewhere
            return None
        if not all_ranks(any(not rollout.is_lost for rollout in batch.rollouts)):
            return None  # a process has lost all its episodes
        settings = sampling_settings(self.config.rollouts)
        return measure_truth(
            batch,
            self.rollouts.collection.continuer(settings),
            seed=derive_seed(self.config.seed, "value truth", start.index, rank()),
            note=self.progress.note,
            groups_are_chosen=self.config.algorithm.dynamic_sampling_attempts > 0
            and start.phase is Phase.POLICY_OPTIMIZATION,
        )

    def truth(
        self,
        measured: tuple[list[TruthPoint], int] | None,
        batch: EvaluatedBatch,
        start: IterationStart,
    ) -> ValueTruth | None:
        """What was measured, beside the critic's values."""
        if measured is None:
            return None
        seed = derive_seed(self.config.seed, "value truth's intervals", start.index)
        return beside_values(
            *measured, batch.old_values, self.config, rollouts=batch.rollouts, seed=seed
        )

    def evaluate(self, batch: RolloutBatch, start: IterationStart) -> EvaluatedBatch:
        """Add the networks' log-probs and values, and entropies where a page shows them."""
        with self.progress.stage("logprobs_values", total=len(batch), unit="responses") as advance:
            evaluated = self.networks.evaluate_rollouts(
                batch, start.phase, with_entropy=page_is_due(self.config, start, ends_phase=False)
            )
            advance(len(batch))
        return evaluated

    def check(self, batch: EvaluatedBatch, start: IterationStart) -> CheckedBatch:
        """Remove the rollouts that have numbers which are not finite, and count them."""
        place = f"iteration {start.number}"
        checked = check_batch(
            batch,
            num_minibatches=common_minibatches(self.config),
            by_group=compares_groups(self.config),
            records=self.networks.faults.rollouts,
            place=place,
        )
        number, num_failed = checked.num_left_out, checked.num_failed
        self.networks.faults.left_out(number, place, checked.reason, num_failed=num_failed)
        return checked

    def estimate(self, batch: EvaluatedBatch, start: IterationStart) -> TrainingBatch:
        """Add advantages, value targets, and the correction of the engine's mismatch."""
        with self.progress.stage("advantages"):
            estimated = estimate_advantages(batch, start.phase, self.config, self.networks.baseline)
            check_value_targets(estimated, self.config.critic)
            return correct_mismatch(estimated, mismatch_of(self.config))

    def cut(
        self, batch: TrainingBatch, start: IterationStart, fault: str | None
    ) -> list[Minibatch]:
        """Shuffle the batch and split it, for each pass; with a `fault` none is trained on."""
        minibatches: list[Minibatch] = []
        for part in passes(self.config, start.phase):
            place = (start.index, rank(), part.index) if part.index else (start.index, rank())
            minibatches += make_minibatches(
                batch,
                num_minibatches=part.num_minibatches,
                max_tokens=self.config.training.microbatch_tokens,
                pad_id=self.networks.pad_id,
                layout=self.networks.layout,
                seed=derive_seed(self.config.seed, "minibatches", *place),
                networks=part.networks,
            )
        return [replace(minibatch, fault=fault) for minibatch in minibatches]

    def last(self, start: IterationStart) -> int:
        """The run's last iteration, counted from 0, as far as is known."""
        if start.phase is Phase.POLICY_OPTIMIZATION:
            return start.index + self.config.training.num_iterations - start.policy_iterations - 1
        return self.total - 1


def mean_over_ranks(rewards: Float[Tensor, " B"]) -> float:
    """The mean of the finite rewards of all ranks; 0 without one."""
    finite = rewards[torch.isfinite(rewards)].double()
    total, count = sum_over_ranks(
        torch.stack([finite.sum(), torch.tensor(len(finite), dtype=torch.double)])
    ).tolist()
    return total / max(count, 1.0)


def is_due(config: FitConfig, start: IterationStart, every_n: int, *, ends_phase: bool) -> bool:
    """Whether an iteration is the first, the last or an n-th of its phase.

    Args:
        ends_phase: whether the iteration has ended value pretraining, which is known after it.
    """
    if start.phase is Phase.POLICY_OPTIMIZATION:
        number = start.policy_iterations + 1
        is_last = number >= config.training.num_iterations
    else:
        number, is_last = start.number, ends_phase
    return number == 1 or is_last or number % every_n == 0


def page_is_due(config: FitConfig, start: IterationStart, *, ends_phase: bool) -> bool:
    """Whether the iteration gets a value page."""
    every_n = config.value_pages.every_n_iterations
    return every_n is not None and is_due(config, start, every_n, ends_phase=ends_phase)
