"""The LightningDataModule: each epoch is one iteration, whose rollouts it collects.

`collect` reads as the stage list: prompts, rollouts, rewards, values, advantages, minibatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import lightning as L
import torch
from torch.utils.data import DataLoader

from vapo.advantages.mismatch import correct_mismatch, correction_metrics
from vapo.config import FitConfig, resolve
from vapo.diagnostics.iteration_metrics import iteration_metrics
from vapo.diagnostics.position_profiles import Profile, position_profile
from vapo.diagnostics.value_page.contents import PageContents, page_contents
from vapo.prompts.load import PromptSplit
from vapo.rewards.scorer import Scorer
from vapo.rollouts.bad_rows import CheckedBatch, check_batch, first_rows
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.engines.contract import Sampler
from vapo.rollouts.kept_rollouts import KeptRollouts, Origin
from vapo.rollouts.sampling_ahead import SampledAhead, Stage, WorkAhead
from vapo.system.distributed import all_ranks, rank, world_size
from vapo.system.progress import Progress
from vapo.system.seeding import derive_seed
from vapo.training.minibatches import Minibatch, make_minibatches
from vapo.training.module import VapoModule
from vapo.types import Phase, RolloutBatch


def is_due(module: VapoModule, phase: Phase, every_n: int) -> bool:
    """First and last iteration of the phase, and every n-th.

    `policy_iterations` and `iteration` do not count this iteration yet. Whether it is the last of
    value pretraining is known once the phase has been switched.
    """
    if phase is Phase.POLICY_OPTIMIZATION:
        finished = int(module.policy_iterations) + 1
        is_last = finished >= module.config.training.num_iterations
    else:
        finished = int(module.iteration) + 1
        is_last = module.phase is Phase.POLICY_OPTIMIZATION
    return finished == 1 or is_last or finished % every_n == 0


def datamodule_of(trainer: L.Trainer) -> RolloutDataModule:
    """The one that the trainer was given."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(datamodule, RolloutDataModule)
    return datamodule


class RolloutDataModule(L.LightningDataModule):
    """Collects a rollout batch from the current policy and hands it out as minibatches.

    The buffer is keyed on the module's own iteration counter: Lightning asks for the
    dataloader once more than it trains on after a resume.
    """

    def __init__(
        self,
        config: FitConfig,
        *,
        prompts: PromptSplit,
        scorer: Scorer,
        make_sampler: Callable[[VapoModule], Sampler],
        progress: Progress,
        pad_id: int,
        kept: KeptRollouts | None = None,
        safe_point: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.config = config
        self.hyperparameters = resolve(config)
        self.prompts = prompts
        self.scorer = scorer
        self.progress = progress
        self.pad_id = pad_id
        self.kept = kept
        self.safe_point = safe_point
        self.metrics: dict[str, float] = {}
        self._make_sampler = make_sampler
        self._sampler: Sampler | None = None
        self._buffer: tuple[int, list[Minibatch]] = (-1, [])
        self._checked: CheckedBatch | None = None
        self._ahead: WorkAhead = WorkAhead()
        self.collection = RolloutCollection(
            config, prompts=prompts, scorer=scorer, sampler=lambda: self.sampler, progress=progress
        )

    @property
    def module(self) -> VapoModule:
        assert self.trainer is not None, "the datamodule is used through a Trainer"
        module = self.trainer.lightning_module
        assert isinstance(module, VapoModule)
        return module

    @property
    def sampler(self) -> Sampler:
        if self._sampler is None:
            self._sampler = self._make_sampler(self.module)
        return self._sampler

    def train_dataloader(self) -> DataLoader[Minibatch]:
        iteration = int(self.module.iteration)
        if self.module.is_finished:  # Lightning asks before it looks whether there is more to do
            self.progress.note("the run has all its iterations already: nothing is left to do")
            self._buffer = (iteration, [])
        if self._buffer[0] != iteration:
            self._buffer[1].clear()  # the DataLoader before this one holds the list, too
            self._checked = None
            self._buffer = (iteration, self.collect(iteration))
        minibatches = self._buffer[1]
        return DataLoader(minibatches, batch_size=None, shuffle=False)  # type: ignore[arg-type]

    def collect(self, iteration: int) -> list[Minibatch]:
        """One iteration's minibatches, by the policy as it is now, or as it was when sampled."""
        phase, total = self.module.phase, self.module.trainer.max_epochs or 0
        self.progress.iteration(iteration + 1, total, phase.value)
        self.safe_point()
        batch, metrics = self.next_batch(iteration)
        self.safe_point()
        self.sampler.sleep()
        if phase is Phase.POLICY_OPTIMIZATION and self.page_is_due(phase):
            batch.old_entropy = torch.zeros(batch.response_mask.shape)
        with self.progress.stage("logprobs_values", total=len(batch), unit="responses") as advance:
            self.module.evaluate_rollouts(batch)
            advance(len(batch))
        self.safe_point()
        checked = self.check(batch, iteration)
        batch = checked.batch
        with self.progress.stage("advantages"):
            self.module.estimate_advantages(batch)
            correct_mismatch(batch, self.config.algorithm.mismatch)
        self.metrics = iteration_metrics(batch, self.hyperparameters) | metrics
        self.metrics |= correction_metrics(batch, self.config.algorithm.mismatch)
        self._checked = checked
        minibatches = self.minibatches(first_rows(batch, checked.num_rows), iteration)
        return [replace(m, fault=checked.fault) for m in minibatches]

    def check(self, batch: RolloutBatch, iteration: int) -> CheckedBatch:
        """Without the rollouts that have numbers which are not finite; they are counted."""
        place, faults = f"iteration {iteration + 1}", self.module.faults
        checked = check_batch(
            batch,
            num_minibatches=self.num_minibatches,
            by_group=self.config.algorithm.compares_groups,
            records=faults.rollouts,
            place=place,
        )
        faults.left_out(checked.num_left_out, place, checked.reason)
        return checked

    # ---- what is shown of the iteration's rollouts, from before its update --------------------

    def page_is_due(self, phase: Phase) -> bool:
        every_n = self.config.value_pages.every_n_iterations
        return every_n is not None and is_due(self.module, phase, every_n)

    def positions(self) -> Profile:
        """The table by token position. Every rank must call this."""
        assert self._checked is not None
        return position_profile(
            self._checked.batch,
            self.hyperparameters,
            max_response_tokens=self.config.rollouts.max_response_tokens,
        )

    def page(self) -> PageContents | None:
        """The page; None where nothing could be trained on. Every rank must call this."""
        assert self._checked is not None
        batch = self._checked.whole_groups()
        if self._checked.fault is not None or not all_ranks(len(batch) > 0):
            return None
        return page_contents(batch, self.config, self.positions(), self._buffer[0])

    # ---- sampling ahead ----------------------------------------------------------------------

    def sample_ahead(self) -> None:
        """Begin the next iteration's rollouts in a thread, if overlap is on and there is one.

        The engine's weights are its own, and stay until `wait_for_samples` has returned.
        """
        if not self.config.training.overlap_rollouts or self.is_last_iteration():
            return
        iteration, phase = int(self.module.iteration) + 1, self.module.phase
        policy_iterations = self.policy_iterations

        def work(stage: Stage) -> SampledAhead:
            batch, metrics = self.collection.sample_batch(iteration, phase, stage)
            return SampledAhead(iteration, policy_iterations, phase, batch, metrics)

        self._ahead.start(work)

    def is_last_iteration(self) -> bool:
        """Whether nothing follows the iteration in training, as far as one can know before it."""
        module = self.module
        if module.phase is Phase.POLICY_OPTIMIZATION:
            return int(module.policy_iterations) + 1 >= self.config.training.num_iterations
        return int(module.iteration) + 1 >= (module.trainer.max_epochs or 0)

    def wait_for_samples(self) -> None:
        """Until the rollouts ahead are there, so that engine and scorer are free."""
        if self._ahead.is_pending:
            with self.progress.stage("rollout_wait"):
                ahead = self._ahead.wait()
            if ahead is not None:
                self.keep(ahead)

    def next_batch(self, iteration: int) -> tuple[RolloutBatch, dict[str, float]]:
        """The rollouts that were sampled ahead, or kept by a run that was stopped; else fresh ones.

        Those of value pretraining, which keeps all prompts, are not what dynamic sampling wants.
        """
        ahead, phase = self._ahead.take(), self.module.phase
        times = {} if ahead is None else {"rollout/ahead_s": self._ahead.seconds}
        ahead = ahead or self.kept_rollouts(iteration)
        changes = self.config.algorithm.dynamic_sampling_attempts > 0
        if ahead is None or ahead.iteration != iteration or (changes and ahead.phase is not phase):
            batch, metrics = self.collection.sample_batch(iteration, phase)
            self.keep(SampledAhead(iteration, self.policy_iterations, phase, batch, metrics))
            return batch, metrics | {"rollout/staleness_iterations": 0.0}
        staleness = self.policy_iterations - ahead.policy_iterations
        metrics = ahead.metrics | {"rollout/staleness_iterations": float(staleness)}
        return ahead.batch, metrics | times

    @property
    def policy_iterations(self) -> int:
        return int(self.module.policy_iterations)

    # ---- rollouts kept for a run that is stopped ---------------------------------------------

    def keep(self, sampled: SampledAhead) -> None:
        """Onto the disk, until the iteration's checkpoint is written."""
        if self.kept is None:
            return
        try:
            self.kept.write(self.origin(sampled.iteration), sampled)
        except OSError as error:  # they can be sampled again
            self.progress.note(f"the rollouts could not be kept: {error.strerror or error}")

    def kept_rollouts(self, iteration: int) -> SampledAhead | None:
        """Those of exactly this iteration and these weights, if every process has its own."""
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
        weights = self.module.lineage.weights
        return Origin(iteration, rank(), world_size(), self.kept.identity, weights)

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's hook, Ctrl-C included: no thread outlives the run."""
        self._ahead.cancel()

    def transfer_batch_to_device(
        self, batch: Minibatch, device: torch.device, dataloader_idx: int
    ) -> Minibatch:
        """Micro-batches are moved one at a time, in the module's `training_step`."""
        return batch

    @property
    def num_minibatches(self) -> int:
        total = self.hyperparameters.num_prompts * self.hyperparameters.group_size
        return total // (self.config.training.minibatch_size or total)

    def minibatches(self, batch: RolloutBatch, iteration: int) -> list[Minibatch]:
        return make_minibatches(
            batch,
            num_minibatches=self.num_minibatches,
            max_tokens=self.config.training.microbatch_tokens,
            pad_id=self.pad_id,
            packed=self.module.reads_packed,
            seed=derive_seed(self.config.seed, "minibatches", iteration, rank()),
        )

    def close(self) -> None:
        """Stop what is sampled ahead, the verifier's processes and the engine."""
        self._ahead.cancel()
        self.scorer.close()
        if self._sampler is not None:
            self._sampler.close()
