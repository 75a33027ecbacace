"""The LightningDataModule: each epoch is one iteration, whose rollouts it collects.

`collect` reads as the stage list: prompts, rollouts, rewards, values, advantages, minibatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vapo.batches import make_rollout_batch
from vapo.config import FitConfig, resolve
from vapo.distributed import gather_over_ranks, rank, world_size
from vapo.dynamic_sampling import Group, fill_with_mixed_groups
from vapo.iteration_metrics import iteration_metrics
from vapo.minibatches import Minibatch, make_minibatches
from vapo.mismatch import correct_mismatch, correction_metrics
from vapo.module import VapoModule
from vapo.overlap import SampledAhead, Stage, WorkAhead
from vapo.position_profiles import Profile, position_profile
from vapo.progress import Progress
from vapo.prompts import PromptSplit, group_sampling
from vapo.rewards.scorer import Scorer
from vapo.rollouts import Sampler, SamplingSettings, sampling_settings
from vapo.seeding import derive_seed
from vapo.types import Phase, Prompt, Rollout, RolloutBatch, Verdict


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
    ) -> None:
        super().__init__()
        self.config = config
        self.hyperparameters = resolve(config)
        self.prompts = prompts
        self.scorer = scorer
        self.progress = progress
        self.pad_id = pad_id
        self.metrics: dict[str, float] = {}
        self.positions: Profile = {}
        self._make_sampler = make_sampler
        self._sampler: Sampler | None = None
        self._buffer: tuple[int, list[Minibatch]] = (-1, [])
        self._ahead: WorkAhead = WorkAhead()

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
        if self._buffer[0] != iteration:
            self._buffer = (iteration, self.collect(iteration))
        minibatches = self._buffer[1]
        return DataLoader(minibatches, batch_size=None, shuffle=False)  # type: ignore[arg-type]

    def collect(self, iteration: int) -> list[Minibatch]:
        """One iteration's minibatches, by the policy as it is now, or as it was when sampled."""
        phase, total = self.module.phase, self.module.trainer.max_epochs or 0
        self.progress.iteration(iteration + 1, total, phase.value)
        batch, metrics = self.next_batch(iteration)
        self.sampler.sleep()
        with self.progress.stage("logprobs_values", total=len(batch), unit="responses") as advance:
            self.module.evaluate_rollouts(batch)
            advance(len(batch))
        with self.progress.stage("advantages"):
            self.module.estimate_advantages(batch)
            correct_mismatch(batch, self.config.algorithm.mismatch)
        self.metrics = iteration_metrics(batch, self.hyperparameters) | metrics
        self.metrics |= correction_metrics(batch, self.config.algorithm.mismatch)
        self.positions = position_profile(
            batch,
            self.hyperparameters,
            max_response_tokens=self.config.rollouts.max_response_tokens,
        )
        return self.minibatches(batch, iteration)

    # ---- sampling ahead ----------------------------------------------------------------------

    def sample_ahead(self) -> None:
        """Begin the next iteration's rollouts in a thread, if overlap is on and there is one.

        The engine's weights are its own, and stay until `wait_for_samples` has returned.
        """
        if not self.config.training.overlap_rollouts or self.is_last_iteration():
            return
        iteration, phase = int(self.module.iteration) + 1, self.module.phase
        policy_iterations = int(self.module.policy_iterations)

        def work(stage: Stage) -> SampledAhead:
            batch, metrics = self.sample_batch(iteration, stage)
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
                self._ahead.wait()

    def next_batch(self, iteration: int) -> tuple[RolloutBatch, dict[str, float]]:
        """The rollouts that were sampled ahead; else, as after a resume, fresh ones.

        Those of value pretraining, which keeps all prompts, are not what dynamic sampling wants.
        """
        ahead, phase = self._ahead.take(), self.module.phase
        changes = self.config.algorithm.dynamic_sampling_attempts > 0
        if ahead is None or ahead.iteration != iteration or (changes and ahead.phase is not phase):
            batch, metrics = self.sample_batch(iteration)
            return batch, metrics | {"rollout/staleness_iterations": 0.0}
        staleness = int(self.module.policy_iterations) - ahead.policy_iterations
        return ahead.batch, ahead.metrics | {
            "rollout/staleness_iterations": float(staleness),
            "rollout/ahead_s": self._ahead.seconds,
        }

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's hook, Ctrl-C included: no thread outlives the run."""
        self._ahead.cancel()

    # ---- sampling ----------------------------------------------------------------------------

    def sample_batch(
        self, iteration: int, stage: Stage | None = None
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """The iteration's rollouts and rewards, and what is logged of how they came about.

        Args:
            stage: what the counts are reported to; default the run's progress.
        """
        stage = stage or self.progress.stage
        algorithm, num_fillers = self.config.algorithm, 0
        max_attempts = algorithm.dynamic_sampling_attempts
        metrics: dict[str, float] = {}
        if max_attempts == 0 or self.module.phase is Phase.VALUE_PRETRAINING:
            groups = self.sample_groups(iteration, 0, stage)
        else:
            filled = fill_with_mixed_groups(
                lambda attempt: self.sample_groups(iteration, attempt, stage),
                num_groups=self.hyperparameters.num_prompts // world_size(),
                max_attempts=max_attempts,
            )
            groups, num_fillers = filled.groups, filled.num_fillers
            metrics |= filled.metrics()
        batch = self.rollout_batch(
            [rollout for group in groups for rollout in group.rollouts],
            [verdict for group in groups for verdict in group.verdicts],
            group_size=self.hyperparameters.group_size,
        )
        if num_fillers:
            assert batch.loss_mask is not None
            carries_loss = torch.ones(len(batch), 1, dtype=torch.bool)
            carries_loss[-num_fillers * batch.group_size :] = False
            batch.loss_mask = batch.loss_mask & carries_loss
        if algorithm.needs_greedy_baseline:
            prompts = [group.rollouts[0].prompt for group in groups]
            baseline = self.greedy_rewards(prompts, iteration, stage)
            batch.baseline_rewards = baseline.repeat_interleave(batch.group_size)
            mean = gather_over_ranks(baseline).mean()
            metrics["rollout/greedy_reward_mean"] = float(mean)
        return batch, metrics

    def sample_groups(self, iteration: int, attempt: int, stage: Stage) -> list[Group]:
        """This rank's prompts of an attempt, each with its responses and their verdicts.

        Attempt 0 takes the prompts that every system takes in this iteration; each later one
        walks an order of its own. All is a function of (seed, iteration, attempt) and the policy.
        """
        hp, seed = self.hyperparameters, self.config.seed
        keys = (iteration, rank()) if attempt == 0 else (iteration, rank(), attempt)
        prompts = group_sampling(
            self.prompts.train,
            num_prompts=hp.num_prompts,
            seed=seed if attempt == 0 else derive_seed(seed, "attempt", attempt),
            iteration=iteration,
            rank=rank(),
            world_size=world_size(),
        )
        rollouts, verdicts = self.sample_and_score(
            prompts,
            stage,
            group_size=hp.group_size,
            settings=sampling_settings(self.config.rollouts),
            seed=derive_seed(seed, "rollouts", *keys),
            shuffle_seed=derive_seed(seed, "shuffled verdicts", *keys),
        )
        return [
            Group(rollouts[i : i + hp.group_size], verdicts[i : i + hp.group_size])
            for i in range(0, len(rollouts), hp.group_size)
        ]

    def greedy_rewards(self, prompts: list[Prompt], iteration: int, stage: Stage) -> Tensor:
        """The reward of one greedy response to each prompt, shaped like the others'."""
        seed = self.config.seed
        rollouts, verdicts = self.sample_and_score(
            prompts,
            stage,
            group_size=1,
            settings=replace(sampling_settings(self.config.rollouts), greedy=True),
            seed=derive_seed(seed, "greedy rollouts", iteration, rank()),
            shuffle_seed=derive_seed(seed, "shuffled greedy verdicts", iteration, rank()),
        )
        return self.rollout_batch(rollouts, verdicts, group_size=1).rewards

    def sample_and_score(
        self,
        prompts: list[Prompt],
        stage: Stage,
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        shuffle_seed: int,
    ) -> tuple[list[Rollout], list[Verdict]]:
        num_rollouts = len(prompts) * group_size
        with stage("rollout", total=num_rollouts, unit="responses") as advance:
            rollouts = self.sampler.sample(
                prompts, group_size=group_size, settings=settings, seed=seed, advance=advance
            )
        with stage("scoring", total=num_rollouts, unit="responses") as advance:
            verdicts = self.scorer.score(
                rollouts,
                advance=advance,
                shuffle_seed=shuffle_seed if self.config.rewards.shuffle else None,
            )
        return rollouts, verdicts

    def rollout_batch(
        self, rollouts: list[Rollout], verdicts: list[Verdict], *, group_size: int
    ) -> RolloutBatch:
        return make_rollout_batch(
            rollouts,
            verdicts,
            group_size=group_size,
            rewards=self.config.rewards,
            max_response_tokens=self.config.rollouts.max_response_tokens,
        )

    def transfer_batch_to_device(
        self, batch: Minibatch, device: torch.device, dataloader_idx: int
    ) -> Minibatch:
        """Micro-batches are moved one at a time, in the module's `training_step`."""
        return batch

    def minibatches(self, batch: RolloutBatch, iteration: int) -> list[Minibatch]:
        size = self.config.training.minibatch_size or len(batch) * world_size()
        return make_minibatches(
            batch,
            num_minibatches=len(batch) * world_size() // size,
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
