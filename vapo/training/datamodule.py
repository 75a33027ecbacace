"""The LightningDataModule: each epoch is one iteration, whose minibatches it hands to Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass

import lightning as L
import torch
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.prompts.load import PromptSplit
from vapo.rewards.scorer import Scorer
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.engines.contract import Sampler
from vapo.rollouts.kept_rollouts import KeptRollouts
from vapo.rollouts.player import Player
from vapo.rollouts.source import RolloutSource
from vapo.rollouts.stored_rollouts import StoredRollouts
from vapo.system.progress import Progress
from vapo.training.iteration import Iteration, IterationRunner
from vapo.training.minibatches import Minibatch
from vapo.training.module import VapoModule
from vapo.training.schedule import num_steps


def datamodule_of(trainer: L.Trainer) -> RolloutDataModule:
    """The RolloutDataModule that the trainer was given."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(datamodule, RolloutDataModule)
    return datamodule


def iteration_of(trainer: L.Trainer) -> Iteration:
    """The iteration that is being trained on, or was trained on last."""
    return datamodule_of(trainer).iteration


class RolloutDataModule(L.LightningDataModule):
    """Holds what an iteration needs, and the iteration in training.

    Args:
        make_sampler: the engine of a run that has something to do.
        tokenizer: the policy's.
        kept: the rollouts on the disk; None: they are not kept.
        stored: the rollouts that value pretraining trains on; None: it samples.
        safe_point: called between stages; may raise, to stop the run.
    """

    iteration: Iteration
    player: Player
    rollouts: RolloutSource
    loader: IterationLoader

    def __init__(
        self,
        config: FitConfig,
        *,
        prompts: PromptSplit,
        scorer: Scorer,
        make_sampler: Callable[[VapoModule], Sampler],
        progress: Progress,
        tokenizer: PreTrainedTokenizerBase,
        kept: KeptRollouts | None = None,
        stored: StoredRollouts | None = None,
        safe_point: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.config = config
        self.prompts = prompts
        self.scorer = scorer
        self.make_sampler = make_sampler
        self.progress = progress
        self.kept = kept
        self.stored = stored
        self.tokenizer = tokenizer
        self.safe_point = safe_point

    def train_dataloader(self) -> Sized:
        """Lightning asks once, when networks and optimizers are as the run begins or resumes.

        Where the phases differ in their numbers of minibatches it asks before each iteration, and
        gets the same loader again.
        """
        assert self.trainer is not None, "the datamodule is used through a Trainer"
        module = self.trainer.lightning_module
        assert isinstance(module, VapoModule)
        if module.is_finished:  # Lightning asks before it looks whether there is more to do
            self.progress.note("the run has all its iterations already: nothing is left to do")
            return []
        if hasattr(self, "loader") and self.loader.module is module:
            return self.loader
        self.player = Player(self.config, self.make_sampler(module), self.scorer, self.tokenizer)
        self.rollouts = self.rollout_source(module)
        self.loader = IterationLoader(self, module, self.iteration_runner(module))
        return self.loader

    def iteration_runner(self, module: VapoModule) -> IterationRunner:
        assert self.trainer is not None
        total = self.trainer.max_epochs or 0
        return IterationRunner(self.rollouts, module, total=total, safe_point=self.safe_point)

    def rollout_source(self, module: VapoModule) -> RolloutSource:
        collection = RolloutCollection(
            self.config,
            prompts=self.prompts,
            player=self.player,
            progress=self.progress,
        )
        return RolloutSource(
            self.config, collection, module.lineage, self.progress, self.kept, self.stored
        )

    def transfer_batch_to_device(
        self, batch: Minibatch, device: torch.device, dataloader_idx: int
    ) -> Minibatch:
        """Micro-batches are moved one at a time, in the module's `training_step`."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's hook, Ctrl-C included: no thread outlives the run."""
        if hasattr(self, "rollouts"):
            self.rollouts.cancel()

    def close(self) -> None:
        """Stop what is sampled ahead, the verifier's processes and the engine."""
        if hasattr(self, "rollouts"):
            self.rollouts.cancel()
        self.scorer.close()
        if hasattr(self, "player"):
            self.player.sampler.close()


@dataclass(frozen=True)
class IterationLoader:
    """What Lightning iterates over: each epoch runs the stages, then yields the minibatches.

    Lightning creates one more iterator than it uses. The stages run when the first minibatch is
    requested, which is after the epoch has begun.
    """

    datamodule: RolloutDataModule
    module: VapoModule
    runner: IterationRunner

    def __len__(self) -> int:
        """Of the next iteration: those of the two phases may differ."""
        return num_steps(self.datamodule.config, self.module.phase)

    def __iter__(self) -> Iterator[Minibatch]:
        if hasattr(self.datamodule, "iteration"):
            del self.datamodule.iteration  # one iteration's rollouts are in memory at a time
        self.datamodule.iteration = self.runner.run(self.module.start)
        yield from self.datamodule.iteration.minibatches
