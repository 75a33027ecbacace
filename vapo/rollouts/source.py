"""Provide an iteration's rollouts: sampled now or ahead, saved by a stopped run, or of a file."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from vapo.config import FitConfig
from vapo.networks.weights_lineage import Lineage
from vapo.rollouts.batch import staleness_metrics
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.continuous_sampling import ContinuousSampling
from vapo.rollouts.kept_rollouts import KeptRollouts, SampledRollouts
from vapo.rollouts.stored_rollouts import StoredRollouts
from vapo.system.distributed import all_ranks, rank
from vapo.system.progress import Progress
from vapo.types import IterationStart, Phase, RolloutBatch


@dataclass(eq=False, repr=False)
class RolloutSource:
    """Hands out each iteration's rollouts once.

    They are sampled when they are asked for, or with `training.max_staleness` above 0 in a thread
    while the networks train. What they are sampled from, how attempts follow one another and what
    becomes of them is the collection's in both cases.

    Args:
        lineage: identifies the weights with which saved rollouts must have been sampled.
        kept: the saved rollouts; None: rollouts are not saved.
        stored: the rollouts that value pretraining trains on; None: it samples.
    """

    config: FitConfig
    collection: RolloutCollection
    lineage: Lineage
    progress: Progress
    kept: KeptRollouts | None = None
    stored: StoredRollouts | None = None
    _ahead: ContinuousSampling | None = field(default=None, init=False)
    _ready: dict[int, SampledRollouts] = field(default_factory=dict, init=False)

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """The rollouts that were sampled ahead, or saved by a run that was stopped; else new ones.

        Rollouts of value pretraining, which keeps all prompts, do not serve dynamic sampling.
        Every rank must call this.

        Args:
            last: the run's last iteration, counted from 0; nothing is sampled beyond it.
        """
        if self.stored is not None and start.phase is Phase.VALUE_PRETRAINING:
            return self.stored.batch(start.index)
        found = self._ready.pop(start.index, None)
        if found is None and self._ahead is None:
            found = self._kept_rollouts(start.index)
        if found is None or not self._serves(found.phase, start):
            if (ahead := self._allow(start, last, first=start.index)) is not None:
                found = self._assembled(ahead, start.index)
            else:
                sampled = self.collection.sample_batch(start.index, start.phase)
                found = SampledRollouts(start.phase, *sampled)
            self._keep(start.index, found)
        self._allow(start, last, first=start.index + 1)
        return found.batch, found.metrics | staleness_metrics(found.batch, start.policy_iterations)

    def _serves(self, phase: Phase, start: IterationStart) -> bool:
        """Whether the iteration may have what was sampled for this phase."""
        return phase is start.phase or self.config.algorithm.dynamic_sampling_attempts == 0

    # ---- sampling ahead ----------------------------------------------------------------------

    def _allow(self, start: IterationStart, last: int, *, first: int) -> ContinuousSampling | None:
        """Let the thread sample as far ahead as rollouts may be old; start it where need be.

        None: nothing is sampled ahead, or nothing is left to sample.
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

    def _assembled(self, ahead: ContinuousSampling, iteration: int) -> SampledRollouts:
        """Wait for what the thread samples, and make the batch. Every rank must call this."""
        filling, seconds = ahead.take(iteration)
        needs_engine = self.config.algorithm.needs_greedy_baseline
        with self.engine_free() if needs_engine else nullcontext():
            batch, metrics = self.collection.batch_of(filling, iteration)
        return SampledRollouts(ahead.phase, batch, metrics | {"rollout/ahead_s": seconds})

    def before_update(self) -> None:
        """Call before the engine gets new weights.

        With `training.update_open_rollouts` episodes under way go on with them. Without, they are
        waited for, so that a batch is of one policy, and saved for a run that is stopped.
        """
        if self._ahead is None or self.config.training.update_open_rollouts:
            return
        for iteration in self._ahead.allowed:
            self._ready[iteration] = self._assembled(self._ahead, iteration)
        if self._ready:  # the next iteration begins with the weights that there are now
            self._keep(min(self._ready), self._ready[min(self._ready)])

    def engine_free(self) -> AbstractContextManager[None]:
        """While nothing is sampled ahead, so that engine and scorer are free."""
        return nullcontext() if self._ahead is None else self._ahead.paused()

    def cancel(self) -> None:
        """Stop sampling ahead: no thread outlives the run."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    # ---- rollouts kept for a run that is stopped ---------------------------------------------

    def _keep(self, iteration: int, sampled: SampledRollouts) -> None:
        """Save the rollouts until the iteration's checkpoint is written."""
        if self.kept is None:
            return
        try:
            self.kept.write(self.kept.origin(iteration, self.lineage.weights), sampled)
        except OSError as error:  # they can be sampled again
            self.progress.note(f"the rollouts could not be kept: {error.strerror or error}")

    def _kept_rollouts(self, iteration: int) -> SampledRollouts | None:
        """The saved rollouts of this iteration and its weights, if every process has its own."""
        if self.kept is None or not all_ranks(self.kept.has(iteration, rank())):
            return None
        found = self.kept.read(self.kept.origin(iteration, self.lineage.weights))
        if not all_ranks(found is not None) or found is None:
            self.progress.note(
                "the kept rollouts are of other weights, data or config, or damaged: "
                "the iteration's are sampled again"
            )
            return None
        self.progress.note("the iteration's rollouts were kept: they are not sampled again")
        found.metrics.pop("rollout/ahead_s", None)  # it was the stopped process's time
        return found
