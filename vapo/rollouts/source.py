"""Provide an iteration's rollouts: sampled now or ahead, saved by a stopped run, or of a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from vapo.config import FitConfig
from vapo.networks.weights_lineage import Lineage
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.continuous_sampling import ContinuousSampling
from vapo.rollouts.dynamic_sampling import Filling
from vapo.rollouts.kept_rollouts import KeptRollouts, Origin
from vapo.rollouts.sampled import SampledRollouts
from vapo.rollouts.stored_rollouts import StoredRollouts
from vapo.system.distributed import all_ranks, max_over_ranks, rank, sum_over_ranks, world_size
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
        self._ahead: ContinuousSampling | None = None
        self._ready: dict[int, SampledRollouts] = {}

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """The rollouts that were sampled ahead, or saved by a run that was stopped; else new ones.

        Rollouts of value pretraining, which keeps all prompts, do not serve dynamic sampling.
        Every rank must call this.

        Args:
            last: the run's last iteration, counted from 0; nothing is sampled beyond it.
        """
        if (stored := self._stored(start)) is not None:
            return stored.batch(start.index)
        found = self._ready.pop(start.index, None)
        if found is None and self._ahead is None:
            found = self._kept_rollouts(start.index)
        if found is not None and self._has_phases and found.phase is not start.phase:
            found = None
        times: dict[str, float] = {}
        if found is None:
            found, times = self._taken(start, last) if self.samples_ahead else self._new(start)
            self._keep(found)
        if self.samples_ahead:
            self._allow(start, last, first=start.index + 1)
        return found.batch, found.metrics | staleness_metrics(found, start) | times

    def is_stored(self, start: IterationStart) -> bool:
        """Whether the iteration's rollouts are those of a file."""
        return self._stored(start) is not None

    def _stored(self, start: IterationStart) -> StoredRollouts | None:
        """The file that has the iteration's rollouts."""
        return self.stored if start.phase is Phase.VALUE_PRETRAINING else None

    def _new(self, start: IterationStart) -> tuple[SampledRollouts, dict[str, float]]:
        batch, metrics = self.collection.sample_batch(start.index, start.phase)
        policy_iterations = start.policy_iterations
        return SampledRollouts(start.index, policy_iterations, start.phase, batch, metrics), {}

    # ---- sampling ahead ----------------------------------------------------------------------

    @property
    def samples_ahead(self) -> bool:
        """Whether rollouts are sampled while the networks train."""
        return self.config.training.max_staleness > 0

    @property
    def _has_phases(self) -> bool:
        """Whether rollouts of one phase do not serve the other."""
        return self.config.algorithm.dynamic_sampling_attempts > 0

    def _allow(self, start: IterationStart, last: int, *, first: int) -> None:
        """Let the thread sample as far ahead as rollouts may be old; start it where need be."""
        furthest = min(start.index + self.config.training.max_staleness, last)
        if self._ahead is not None and self._has_phases and self._ahead.phase is not start.phase:
            self.cancel()
        if self._ahead is None:
            if first > furthest:
                return
            self._ahead = ContinuousSampling(self.collection, start.phase, first=first)
        self._ahead.allow(furthest, version=start.policy_iterations)

    def _taken(self, start: IterationStart, last: int) -> tuple[SampledRollouts, dict[str, float]]:
        """The iteration's rollouts from the thread, once they are there."""
        self._allow(start, last, first=start.index)
        assert self._ahead is not None
        filling, seconds = self._waited_for(self._ahead, start)
        sampled = self._assembled(filling, start.index, self._ahead.phase)
        return sampled, {"rollout/ahead_s": seconds}

    def _waited_for(
        self, ahead: ContinuousSampling, start: IterationStart
    ) -> tuple[Filling, float]:
        """Wait for the iteration's groups, and show how many of its episodes have ended."""
        filling, shown = self.collection.filling(start.phase), 0
        is_known = filling.max_attempts == 0
        total = filling.num_groups * self.collection.hyperparameters.group_size
        with self.progress.stage("rollout_wait", total if is_known else None, "episodes") as show:

            def poll() -> None:
                nonlocal shown
                before, shown = shown, max(shown, ahead.num_ended(start.index))
                show(shown - before)

            return ahead.take(start.index, poll)

    def _assembled(self, filling: Filling, iteration: int, phase: Phase) -> SampledRollouts:
        """Make the batch of what the thread sampled. Every rank must call this."""
        needs_engine = self.config.algorithm.needs_greedy_baseline
        with self.engine_free() if needs_engine else nullcontext():
            batch, metrics = self.collection.batch_of(filling.filled(), iteration, phase)
        versions = [r.version for r in batch.rollouts if r.version is not None]
        oldest = min(versions, default=0)
        return SampledRollouts(iteration, oldest, phase, batch, metrics)

    def before_update(self) -> None:
        """Call before the engine gets new weights.

        With `training.update_open_rollouts` episodes under way go on with them. Without, they are
        waited for, so that a batch is of one policy, and saved for a run that is stopped.
        """
        if self._ahead is None or self.config.training.update_open_rollouts:
            return
        with self.progress.stage("rollout_wait") as advance:
            self._ahead.wait(lambda: advance(0))
        for iteration in self._ahead.finished:
            filling, _ = self._ahead.take(iteration, self.progress.poll)
            self._ready[iteration] = self._assembled(filling, iteration, self._ahead.phase)
        if self._ready:  # the next iteration begins with the weights that there are now
            self._keep(self._ready[min(self._ready)])

    @contextmanager
    def engine_free(self) -> Iterator[None]:
        """While nothing is sampled ahead, so that engine and scorer are free."""
        with ExitStack() as stack:
            if self._ahead is not None:
                with self.progress.stage("rollout_wait") as advance:
                    stack.enter_context(self._ahead.paused(lambda: advance(0)))
            yield

    def cancel(self) -> None:
        """Stop sampling ahead: no thread outlives the run."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

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


def staleness_metrics(found: SampledRollouts, start: IterationStart) -> dict[str, float]:
    """By how many policy iterations the weights that sampled are older than the actor's now.

    The mean is over sampled tokens; a turn has the age of the weights when it was asked for.
    """
    ages: list[float] = [0.0]  # of no token
    tokens: list[int] = [0]
    for rollout in found.batch.rollouts:
        for turn in rollout.turns:
            version = found.policy_iterations if turn.version is None else turn.version
            ages.append(float(start.policy_iterations - version))
            tokens.append(turn.num_sampled)
    age, count = torch.tensor(ages).double(), torch.tensor(tokens).double()
    total, num = sum_over_ranks(torch.stack([(age * count).sum(), count.sum()])).tolist()
    return {
        "rollout/staleness_iterations": float(max_over_ranks(age.max())),
        "rollout/staleness_mean": total / num if num else 0.0,
    }
