"""One iteration, from prompts to minibatches: the stages in the order of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from vapo.advantages.agreement import mask_by_spread
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.mismatch_correction import correct_mismatch, correction_metrics
from vapo.advantages.poise import Baseline
from vapo.advantages.value_loss_columns import check_value_targets
from vapo.config import FitConfig, resolve
from vapo.config.hyperparameters import (
    compares_groups,
    evaluated_iterations,
    is_first_last_or_nth,
    mismatch_of,
)
from vapo.diagnostics.iteration_metrics import iteration_metrics
from vapo.networks.token_inputs import Layout
from vapo.rollouts.bad_rows import CheckedBatch, check_batch, first_rows
from vapo.rollouts.player import RolloutRunner
from vapo.rollouts.source import RolloutSource
from vapo.system.distributed import rank
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.training.faults import Faults
from vapo.training.microbatching import MicrobatchChoice
from vapo.training.minibatches import (
    NETWORKS,
    Minibatch,
    common_minibatches,
    make_minibatches,
    passes,
)
from vapo.types import EvaluatedBatch, IterationStart, Phase, RolloutBatch, TrainingBatch


@dataclass
class IterationRunner:
    """Runs the stages of an iteration; every rank runs the same ones.

    Args:
        rollouts: the source of the rollouts: an engine that samples them, or a file.
        networks: actor and critic (a `VapoModule`).
        total: the expected number of iterations of the whole run.
        observers: called between stages, in this order.
        trained: the networks that minibatches may train; the others stay as they are.
        safe_point: called between stages. It raises an exception to stop the run.
    """

    config: FitConfig
    rollouts: Rollouts
    networks: Networks
    progress: Progress
    total: int
    observers: Sequence[Observer] = ()
    trained: Sequence[str] = NETWORKS
    safe_point: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        # without them all rollouts are a file's, and there is no engine
        self.source = self.rollouts if isinstance(self.rollouts, RolloutSource) else None
        self.player = None if self.source is None else self.source.collection.player

    def run(self, start: IterationStart) -> Iteration:
        """Run an iteration's stages, from sampling to minibatches, and return the iteration.

        Training on the minibatches and `sync` follow, by the caller.
        """
        to_come = [n for n in evaluated_iterations(self.config) if n > start.policy_iterations]
        is_policy = start.phase is Phase.POLICY_OPTIMIZATION
        self.progress.iteration(
            *(start.number, self.total, start.phase.value),
            num_evaluations=len(to_come),
            num_later=0 if is_policy else self.config.training.num_iterations,
        )
        self.safe_point()
        rollouts, metrics = self.rollouts.next_batch(start, last=self.last(start))
        self.safe_point()
        for observer in self.observers:
            metrics |= observer.sampled(rollouts, start, self.player)
        self.sleep()
        # the memory of an engine that sleeps is training's: before it wakes vLLM gives all that
        # torch has cached back to the GPU
        if (line := self.networks.choose_microbatching(rollouts)) is not None:
            self.progress.note(line)
        evaluated = self.evaluate(rollouts, start)
        self.safe_point()
        for observer in self.observers:
            metrics |= observer.evaluated(evaluated, start)
        checked = self.check(evaluated, start)
        estimated = self.estimate_and_correct(checked.batch, start)
        batch, mask_metrics = self.mask_and_measure(estimated, start)
        minibatches = self.cut(first_rows(batch, checked.num_rows), start, checked.fault)
        return Iteration(start, minibatches, mask_metrics | metrics, batch, checked)

    def last(self, start: IterationStart) -> int:
        """Return the index of the run's last iteration, counted from 0.

        Value pretraining may end early, so in its phase this is the highest possible index.
        """
        if start.phase is Phase.POLICY_OPTIMIZATION:
            return start.index + self.config.training.num_iterations - start.policy_iterations - 1
        return self.total - 1

    def sleep(self) -> None:
        """Let the engine free its memory for the networks, unless it samples while they train
        (`training.max_staleness`)."""
        if self.player is not None and not self.config.training.max_staleness:
            self.player.sampler.sleep()

    def evaluate(self, batch: RolloutBatch, start: IterationStart) -> EvaluatedBatch:
        """Return the batch with the networks' log-probs and values added.

        Entropies are added in iterations that write a value page.
        """
        every_n = self.config.value_pages.every_n_iterations
        with_entropy = is_due(self.config, start, every_n, ends_phase=False)
        with self.progress.stage("logprobs_values", total=len(batch), unit="responses") as advance:
            evaluated = self.networks.add_logprobs_and_values(
                batch, start.phase, with_entropy=with_entropy
            )
            advance(len(batch))
        return evaluated

    def check(self, batch: EvaluatedBatch, start: IterationStart) -> CheckedBatch:
        """Leave out rollouts with numbers that are not finite, and count them in `faults`."""
        place = f"iteration {start.number}"
        checked = check_batch(
            batch,
            num_minibatches=common_minibatches(self.config),
            by_group=compares_groups(self.config),
            records=self.networks.faults.rollouts,
            place=place,
            reads_entropies=self.config.algorithm.reads_entropies,
        )
        number, num_failed = checked.num_left_out, checked.num_failed
        self.networks.faults.left_out(number, place, checked.reason, num_failed=num_failed)
        return checked

    def estimate_and_correct(self, batch: EvaluatedBatch, start: IterationStart) -> TrainingBatch:
        """Return the batch with advantages and value targets, corrected for engine mismatch.

        Engine mismatch is the difference between the sampling engine's log-probs and the trainer's.
        """
        with self.progress.stage("advantages"):
            estimated = estimate_advantages(batch, start.phase, self.config, self.networks.baseline)
            check_value_targets(estimated, self.config.critic)
            return correct_mismatch(estimated, mismatch_of(self.config))

    def mask_and_measure(
        self, batch: TrainingBatch, start: IterationStart
    ) -> tuple[TrainingBatch, dict[str, float]]:
        """Compute the metrics; with several critics, mask tokens by the spread of their values.

        Tokens are masked out of the policy's losses by `agreement_mask_share` and
        `disagreement_mask_share`.

        Returns: the masked batch, and the metrics, which are computed before masking.
        """
        algorithm = self.config.algorithm
        metrics = iteration_metrics(batch, resolve(self.config))
        metrics |= correction_metrics(batch, mismatch_of(self.config))
        if batch.value_spread is not None:
            batch, masked = mask_by_spread(
                batch,
                agreement=algorithm.agreement_mask_share,
                disagreement=algorithm.disagreement_mask_share,
            )
            metrics |= masked
        if start.phase is Phase.POLICY_OPTIMIZATION:
            metrics |= self.networks.baseline.metrics
        return batch, metrics

    def cut(
        self, batch: TrainingBatch, start: IterationStart, fault: str | None
    ) -> list[Minibatch]:
        """Shuffle the batch for each pass over it, and return the minibatches of all passes.

        A `fault` is the reason why nothing in the batch may be trained on. It is set on each
        minibatch. It is None if the batch may be trained on.
        """
        minibatches: list[Minibatch] = []
        for index, part in enumerate(passes(self.config, start.phase)):
            place = (start.index, rank(), index) if index else (start.index, rank())
            minibatches += make_minibatches(
                batch,
                num_minibatches=part.num_minibatches,
                max_tokens=self.networks.microbatching.tokens,
                pad_id=self.networks.pad_id,
                layout=self.networks.layout,
                seed=derive_seed(self.config.seed, "minibatches", *place),
                networks=tuple(name for name in part.networks if name in self.trained),
            )
        return [replace(minibatch, fault=fault) for minibatch in minibatches]

    def sync(self, next_phase: Phase, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send the policy's weights to the engine if the next iteration is of the policy phase.

        During value pretraining the weights do not change, so none are sent. This must come before
        everything else that uses the engine, because rollouts that are being sampled ahead are
        first waited for where the config says so. Every rank must call this.
        """
        if self.source is None or self.player is None:
            return
        self.source.before_update()
        if next_phase is Phase.POLICY_OPTIMIZATION:
            with self.progress.stage("weight_sync"):
                self.player.sampler.sync(weights)


@dataclass(frozen=True)
class Iteration:
    """One iteration: its minibatches and metrics, and its rollout batch from before the update.

    `checked` is the batch after rollouts with numbers that are not finite were left out. `batch`
    has advantages and value targets.
    """

    start: IterationStart
    minibatches: list[Minibatch]
    metrics: dict[str, float]
    batch: TrainingBatch
    checked: CheckedBatch

    @property
    def number(self) -> int:
        """The iteration's number, which is 1 for the first of the run."""
        return self.start.number

    @property
    def phase(self) -> Phase:
        """The phase that the iteration belongs to."""
        return self.start.phase


def is_due(
    config: FitConfig, start: IterationStart, every_n: int | None, *, ends_phase: bool
) -> bool:
    """Whether the iteration is a phase's first, last, or an `every_n`-th.

    Args:
        every_n: None: it never happens.
        ends_phase: whether the iteration ends value pretraining. This is known only after it.
    """
    if start.phase is Phase.POLICY_OPTIMIZATION:
        number = start.policy_iterations + 1
        is_last = number >= config.training.num_iterations
    else:
        number, is_last = start.number, ends_phase
    return is_first_last_or_nth(number, every_n, is_last=is_last)


class Networks(Protocol):
    """What an iteration's stages use of actor and critic, as `VapoModule` has it."""

    pad_id: int
    faults: Faults
    baseline: Baseline
    microbatching: MicrobatchChoice

    def choose_microbatching(self, batch: RolloutBatch) -> str | None:
        """Choose, once, the micro-batch settings that the config leaves to the free memory.

        Returns: a line that describes the choice, or None if nothing was chosen.
        """

    @property
    def layout(self) -> Layout:
        """The layout of the networks' inputs: padded rows or one packed row."""

    def add_logprobs_and_values(
        self, batch: RolloutBatch, phase: Phase, *, with_entropy: bool
    ) -> EvaluatedBatch:
        """Return the batch with the log-probs and values that the phase needs."""


class Rollouts(Protocol):
    """A source of rollout batches: a `RolloutSource`, which samples them, or a file."""

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Return the iteration's rollouts, and the metrics of sampling them.

        `last` is the index of the run's last iteration, beyond which nothing is sampled ahead.
        """


class Observer:
    """Base of classes that look at the rollout batch between stages, and change nothing.

    Each method returns metrics that are added to the iteration's. Every rank must call the methods.
    """

    def sampled(
        self, batch: RolloutBatch, start: IterationStart, player: RolloutRunner | None
    ) -> dict[str, float]:
        """Look at sampled rollouts, which have no values yet; return metrics.

        `player` can still sample with the engine. It is None if the run has no engine.
        """
        return {}

    def evaluated(self, batch: EvaluatedBatch, start: IterationStart) -> dict[str, float]:
        """Look at rollouts that have values, before any are left out; return metrics."""
        return {}
