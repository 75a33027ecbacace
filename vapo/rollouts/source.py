"""Provide an iteration's rollouts: sampled now or ahead, saved by a stopped run, or of a file."""

from __future__ import annotations

from vapo.config import FitConfig
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.kept_rollouts import KeptRollouts, Origin
from vapo.rollouts.sampling_ahead import SampledRollouts, Stage, WorkAhead
from vapo.rollouts.stored_rollouts import StoredRollouts
from vapo.runs.weights_lineage import Lineage
from vapo.system.distributed import all_ranks, rank, world_size
from vapo.system.progress import Progress
from vapo.types import IterationStart, Phase, RolloutBatch


class RolloutSource:
    """Hands out each iteration's rollouts once.

    Args:
        lineage: identifies the weights with which saved rollouts must have been sampled.
        kept: the saved rollouts; None: rollouts are not saved.
        stored: the rollouts that value pretraining trains on; None: it samples.
    """

    def __init__(
        self,
        config: FitConfig,
        collection: RolloutCollection,
        lineage: Lineage,
        progress: Progress,
        kept: KeptRollouts | None = None,
        stored: StoredRollouts | None = None,
    ) -> None:
        self.config = config
        self.collection = collection
        self.lineage = lineage
        self.progress = progress
        self.kept = kept
        self.stored = stored
        self._ahead = WorkAhead()

    def next_batch(self, start: IterationStart) -> tuple[RolloutBatch, dict[str, float]]:
        """The rollouts that were sampled ahead, or saved by a run that was stopped; else new ones.

        Rollouts of value pretraining, which keeps all prompts, do not serve dynamic sampling.
        Every rank must call this.
        """
        if (stored := self._stored(start)) is not None:
            return stored.batch(start.index)
        found = self._ahead.take()
        times = {} if found is None else {"rollout/ahead_s": self._ahead.seconds}
        found = found or self._kept_rollouts(start.index)
        changes = self.config.algorithm.dynamic_sampling_attempts > 0
        if (
            found is None
            or found.iteration != start.index
            or (changes and found.phase is not start.phase)
        ):
            found, times = self._new_rollouts(start.index, start), {}
            self._keep(found)
        staleness = start.policy_iterations - found.policy_iterations
        metrics = found.metrics | {"rollout/staleness_iterations": float(staleness)}
        return found.batch, metrics | times

    def is_stored(self, start: IterationStart) -> bool:
        """Whether the iteration's rollouts are those of a file."""
        return self._stored(start) is not None

    def _stored(self, start: IterationStart) -> StoredRollouts | None:
        """The file that has the iteration's rollouts."""
        return self.stored if start.phase is Phase.VALUE_PRETRAINING else None

    def _new_rollouts(
        self, iteration: int, start: IterationStart, stage: Stage | None = None
    ) -> SampledRollouts:
        batch, metrics = self.collection.sample_batch(iteration, start.phase, stage)
        return SampledRollouts(iteration, start.policy_iterations, start.phase, batch, metrics)

    # ---- sampling ahead ----------------------------------------------------------------------

    def sample_ahead(self, start: IterationStart) -> None:
        """Start sampling the rollouts of the next iteration in a thread.

        The engine's weights are its own, and stay until `wait` has returned. Beside value
        pretraining from a file nothing is sampled.
        """
        if self._stored(start) is not None:
            return
        self._ahead.start(lambda stage: self._new_rollouts(start.index + 1, start, stage))

    def wait(self) -> None:
        """Wait for the rollouts that are sampled ahead, so that engine and scorer are free."""
        if self._ahead.is_pending:
            with self.progress.stage("rollout_wait"):
                ahead = self._ahead.wait()
            if ahead is not None:
                self._keep(ahead)

    def cancel(self) -> None:
        """Stop sampling ahead: no thread outlives the run."""
        self._ahead.cancel()

    # ---- rollouts kept for a run that is stopped ---------------------------------------------

    def _keep(self, sampled: SampledRollouts) -> None:
        """Save the rollouts until the iteration's checkpoint is written."""
        if self.kept is None:
            return
        try:
            self.kept.write(self.origin(sampled.iteration), sampled)
        except OSError as error:  # they can be sampled again
            self.progress.note(f"the rollouts could not be kept: {error.strerror or error}")

    def _kept_rollouts(self, iteration: int) -> SampledRollouts | None:
        """The saved rollouts of this iteration and its weights, if every process has its own."""
        if self.kept is None or not all_ranks(self.kept.has(iteration, rank())):
            return None
        found = self.kept.read(self.origin(iteration))
        if not all_ranks(found is not None):
            self.progress.note(
                "the kept rollouts are of other weights, data or config, or damaged: "
                "the iteration's are sampled again"
            )
            return None
        self.progress.note("the iteration's rollouts were kept: they are not sampled again")
        return found

    def origin(self, iteration: int) -> Origin:
        assert self.kept is not None
        return Origin(iteration, rank(), world_size(), self.kept.identity, self.lineage.weights)
