"""Provides rollouts: sampled now or ahead, saved by a stopped run, or read from a file."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from vapo.config import FitConfig
from vapo.networks.weights_lineage import Lineage
from vapo.rollouts.batch import staleness_metrics
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.continuous_sampling import ContinuousSampling
from vapo.rollouts.kept_rollouts import IterationRollouts, ResumeCache
from vapo.rollouts.stored_rollouts import RolloutDataset
from vapo.system.distributed import all_ranks, rank
from vapo.system.progress import Progress
from vapo.types import IterationStart, Phase, RolloutBatch


@dataclass(eq=False, repr=False)
class RolloutSource:
    """Gives the training loop the rollouts of each iteration, once. A run has one.

    They are sampled on request, or with `training.max_staleness` above 0 in a thread while the
    networks train. In both cases `collection` decides on prompts, attempts and the batch.

    Args:
        lineage: identifies the weights with which saved rollouts must have been sampled.
        resume_cache: the saved rollouts; None: rollouts are not saved.
        stored: the rollouts that value pretraining trains on; None: it samples.
    """

    config: FitConfig
    collection: RolloutCollection
    lineage: Lineage
    progress: Progress
    resume_cache: ResumeCache | None = None
    stored: RolloutDataset | None = None
    _ahead: ContinuousSampling | None = field(default=None, init=False)
    _ready: dict[int, IterationRollouts] = field(default_factory=dict, init=False)

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Return the batch of an iteration's rollouts with the metrics of sampling.

        They were sampled ahead, or saved by a run that was stopped; else they are sampled now. In
        value pretraining they may come from a file. Value pretraining keeps all prompts, so with
        dynamic sampling its rollouts are not used for another phase. Every rank must call this.

        Args:
            last: the run's last iteration, counted from 0; nothing is sampled beyond it.
        """
        if self.stored is not None and start.phase is Phase.VALUE_PRETRAINING:
            return self.stored.batch(start.index)
        rollouts = self._ready.pop(start.index, None)
        if rollouts is None and self._ahead is None:
            rollouts = self._kept_rollouts(start.index)
        if rollouts is None or not self._serves(rollouts.phase, start):
            if (ahead := self._allow(start, last, first=start.index)) is not None:
                rollouts = self._assembled(ahead, start.index)
            else:
                sampled = self.collection.sample_batch(start.index, start.phase)
                rollouts = IterationRollouts(start.phase, *sampled)
            self._keep(start.index, rollouts)
        self._allow(start, last, first=start.index + 1)
        staleness = staleness_metrics(rollouts.batch, start.policy_iterations)
        return rollouts.batch, rollouts.metrics | staleness

    def _serves(self, phase: Phase, start: IterationStart) -> bool:
        """Whether the iteration `start` may train on rollouts that were sampled for `phase`."""
        return phase is start.phase or self.config.algorithm.dynamic_sampling_attempts == 0

    # ---- sampling ahead ----------------------------------------------------------------------

    def _allow(self, start: IterationStart, last: int, *, first: int) -> ContinuousSampling | None:
        """Let the thread sample as far ahead as `training.max_staleness` allows.

        The thread is started if necessary, with the iteration `first`.

        Returns: the thread; None if nothing is sampled ahead, or nothing is left to sample.
        """
        if self.config.training.max_staleness == 0:
            return None
        furthest = min(start.index + self.config.training.max_staleness, last)
        if self._ahead is not None and not self._serves(self._ahead.phase, start):
            self.cancel()
        if self._ahead is None and first <= furthest:
            self._ahead = ContinuousSampling(self.collection, start.phase, first=first)
        if self._ahead is not None:
            self._ahead.allow(furthest, version=start.policy_iterations)
        return self._ahead

    def _assembled(self, ahead: ContinuousSampling, iteration: int) -> IterationRollouts:
        """Wait for the rollouts that the thread samples for an iteration, and make their batch.

        Every rank must call this.
        """
        collector, seconds = ahead.take(iteration)
        needs_engine = self.config.algorithm.needs_greedy_baseline
        with self.engine_free() if needs_engine else nullcontext():
            batch, metrics = self.collection.batch_of(collector, iteration)
        return IterationRollouts(ahead.phase, batch, metrics | {"rollout/ahead_s": seconds})

    def before_update(self) -> None:
        """Wait until no episode is open, so that one policy samples a whole batch.

        Call this before the engine gets new weights. The next iteration's rollouts are saved in
        case the run is stopped. With `training.update_open_rollouts` nothing is done: open episodes
        go on with the new weights.
        """
        if self._ahead is None or self.config.training.update_open_rollouts:
            return
        for iteration in self._ahead.allowed:
            self._ready[iteration] = self._assembled(self._ahead, iteration)
        if self._ready:  # the next iteration begins with the weights that there are now
            self._keep(min(self._ready), self._ready[min(self._ready)])

    def engine_free(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is sampled ahead, so engine and scorer are free."""
        return nullcontext() if self._ahead is None else self._ahead.paused()

    def cancel(self) -> None:
        """Stop sampling ahead: no thread outlives the run."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    # ---- rollouts kept for a run that is stopped ---------------------------------------------

    def _keep(self, iteration: int, sampled: IterationRollouts) -> None:
        """Save an iteration's rollouts for a run that resumes before its checkpoint is written.

        If they cannot be saved, a note says so.
        """
        if self.resume_cache is None:
            return
        try:
            origin = self.resume_cache.origin(iteration, self.lineage.weights)
            self.resume_cache.write(origin, sampled)
        except OSError as error:  # they can be sampled again
            self.progress.note(f"the rollouts could not be kept: {error.strerror or error}")

    def _kept_rollouts(self, iteration: int) -> IterationRollouts | None:
        """Return the rollouts that a stopped run has saved for this iteration.

        None: not every process has them, or other weights, data or config sampled them.
        """
        cache, tokenizer = self.resume_cache, self.collection.player.tokenizer
        if cache is None or not all_ranks(cache.has(iteration, rank())):
            return None
        rollouts = cache.read(cache.origin(iteration, self.lineage.weights), self.config, tokenizer)
        if not all_ranks(rollouts is not None) or rollouts is None:
            self.progress.note(
                "the kept rollouts were sampled with other weights, data or config, are damaged, "
                "or an earlier vapo saved them: the iteration's rollouts are sampled again"
            )
            return None
        self.progress.note("the iteration's rollouts were kept: they are not sampled again")
        rollouts.metrics.pop("rollout/ahead_s", None)  # it was the stopped process's time
        return rollouts
