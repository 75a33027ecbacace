"""The LightningDataModule: each epoch is one iteration, whose rollouts it collects.

`collect` reads as the stage list: prompts, rollouts, rewards, values, advantages, minibatches.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch
from torch.utils.data import DataLoader

from vapo.batches import make_rollout_batch
from vapo.config import FitConfig, resolve
from vapo.distributed import rank, world_size
from vapo.iteration_metrics import iteration_metrics
from vapo.minibatches import Minibatch, make_minibatches
from vapo.module import VapoModule
from vapo.position_profiles import Profile, position_profile
from vapo.progress import Progress
from vapo.prompts import PromptSplit, group_sampling
from vapo.rewards.scorer import Scorer
from vapo.rollouts import Sampler, sampling_settings
from vapo.seeding import derive_seed
from vapo.strategies import gathered
from vapo.types import RolloutBatch


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
        """One iteration's minibatches, sampled from the policy as it is now."""
        config, hp, seed = self.config, self.hyperparameters, self.config.seed
        phase, total = self.module.phase, self.module.trainer.max_epochs or 0
        self.progress.iteration(iteration + 1, total, phase.value)
        prompts = group_sampling(
            self.prompts.train,
            num_prompts=hp.num_prompts,
            seed=seed,
            iteration=iteration,
            rank=rank(),
            world_size=world_size(),
        )
        num_rollouts = len(prompts) * hp.group_size
        stage = self.progress.stage
        with (
            stage("rollout", total=num_rollouts, unit="responses") as advance,
            gathered(self.module.actor),
        ):
            rollouts = self.sampler.sample(
                prompts,
                group_size=hp.group_size,
                settings=sampling_settings(config.rollouts),
                seed=derive_seed(seed, "rollouts", iteration, rank()),
                advance=advance,
            )
        with stage("scoring", total=num_rollouts, unit="responses") as advance:
            verdicts = self.scorer.score(
                rollouts,
                advance=advance,
                shuffle_seed=derive_seed(seed, "shuffled verdicts", iteration, rank())
                if config.rewards.shuffle
                else None,
            )
        batch = make_rollout_batch(
            rollouts,
            verdicts,
            group_size=hp.group_size,
            rewards=config.rewards,
            max_response_tokens=config.rollouts.max_response_tokens,
        )
        with stage("logprobs_values", total=num_rollouts, unit="responses") as advance:
            self.module.evaluate_rollouts(batch)
            advance(num_rollouts)
        self.module.estimate_advantages(batch)
        self.metrics = iteration_metrics(batch, hp)
        self.positions = position_profile(
            batch, hp, max_response_tokens=config.rollouts.max_response_tokens
        )
        return self.minibatches(batch, iteration)

    def transfer_batch_to_device(
        self, batch: Minibatch, device: torch.device, dataloader_idx: int
    ) -> Minibatch:
        """Micro-batches are moved one at a time, in the module's `training_step`."""
        return batch

    def minibatches(self, batch: RolloutBatch, iteration: int) -> list[Minibatch]:
        return make_minibatches(
            batch,
            num_minibatches=len(batch) * world_size() // self.config.training.minibatch_size,
            max_tokens=self.config.training.microbatch_tokens,
            pad_id=self.pad_id,
            seed=derive_seed(self.config.seed, "minibatches", iteration, rank()),
        )

    def close(self) -> None:
        """Stop the verifier's processes and the engine."""
        self.scorer.close()
        if self._sampler is not None:
            self._sampler.close()
