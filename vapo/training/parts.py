"""Puts the parts of a training together, for the commands that train and for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.prompts.load import PromptSplit
from vapo.rewards.scorer import Scorer
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.engines.contract import Sampler
from vapo.rollouts.engines.selection import make_sampler
from vapo.rollouts.kept_rollouts import ResumeCache
from vapo.rollouts.player import RolloutRunner
from vapo.rollouts.source import RolloutSource
from vapo.rollouts.stored_rollouts import RolloutDataset
from vapo.runs.run_dirs import RunDir
from vapo.system.progress import Progress
from vapo.training.callbacks.value_pretraining import ValuePretraining
from vapo.training.datamodule import RolloutDataModule, WeightSync, actor_access
from vapo.training.iteration import Observer, Rollouts
from vapo.training.minibatches import NETWORKS, num_steps
from vapo.training.module import VapoModule
from vapo.training.observers import HeadStart, ValueTruths
from vapo.training.strategy import lightning_precision, make_strategy
from vapo.types import Phase

MakeSampler = Callable[[VapoModule], Sampler]


@dataclass(frozen=True)
class Inputs:
    """The tokenizer, prompts and stored rollouts of a training, which are read before its networks.

    Attributes:
        tokenizer: the policy's tokenizer.
        prompts: the training prompts and the held-out ones.
        stored: the rollouts that value pretraining trains on. If None, it samples its own.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSplit
    stored: RolloutDataset | None = None


@dataclass(frozen=True)
class Sampling:
    """Makes the source of a module's rollouts: the actor samples, and the scorer judges.

    Args:
        rollout_cache: keeps rollouts on the disk for a run that resumes; None: none are kept.
        make_sampler: makes an engine that is used instead of the config's.
        run_dir: the folder to which the engine's log is written; None: no log is kept.
    """

    config: FitConfig
    inputs: Inputs
    scorer: Scorer
    progress: Progress
    rollout_cache: ResumeCache | None = None
    make_sampler: MakeSampler | None = None
    run_dir: RunDir | None = None

    def __call__(self, module: VapoModule) -> RolloutSource:
        """Start the engine, and return the source of the module's rollouts."""
        config, tokenizer, prompts = self.config, self.inputs.tokenizer, self.inputs.prompts
        if self.make_sampler is not None:
            sampler = self.make_sampler(module)
        else:
            sampler = self._engine(module)
        player = RolloutRunner(config, sampler, self.scorer, tokenizer)
        collection = RolloutCollection(
            config, prompts=prompts, player=player, progress=self.progress
        )
        stored = self.inputs.stored
        return RolloutSource(
            config, collection, module.lineage, self.progress, self.rollout_cache, stored
        )

    def _engine(self, module: VapoModule) -> Sampler:
        """Start the config's engine. The start of vLLM, which takes time, is shown as a stage."""
        is_built_in = self.config.rollouts.engine == "transformers"
        with nullcontext() if is_built_in else self.progress.stage("engine_start"):
            return make_sampler(
                self.config,
                actor_access(module),
                self.inputs.tokenizer,
                run_folder=None if self.run_dir is None else self.run_dir.path,
                note=self.progress.note,
            )


@dataclass(frozen=True)
class TrainingParts:
    """The arguments that `L.Trainer` needs to train a config.

    Attributes:
        module: the LightningModule, with actor and critic.
        datamodule: each of its epochs is one iteration: it samples, judges and cuts minibatches.
        callbacks: value pretraining, if there is one, and the one that sends weights to the engine.
        trainer_options: arguments of `L.Trainer` that follow from the config: devices, strategy,
            precision, the number of epochs, and how Lightning treats the loader.
        truths: the observer that measures true values, or None if `value_truth` is off.
    """

    module: VapoModule
    datamodule: RolloutDataModule
    callbacks: list[Callback]
    trainer_options: dict[str, Any]
    truths: ValueTruths | None


def module_of(config: FitConfig, inputs: Inputs) -> VapoModule:
    """Make the module of a config. Lightning loads its networks in `configure_model`."""
    return VapoModule(config, pad_id=int(inputs.tokenizer.pad_token_id))


def assemble_parts(
    module: VapoModule,
    make_rollouts: Callable[[VapoModule], Rollouts],
    *,
    progress: Progress,
    critic_dir: Path | None,
    stored: RolloutDataset | None = None,
    trained: Sequence[str] = NETWORKS,
    safe_point: Callable[[], None] = lambda: None,
) -> TrainingParts:
    """Make the datamodule, callbacks and trainer options that train the module.

    Args:
        make_rollouts: called with the module; returns the source of its rollouts.
        critic_dir: the folder to which value pretraining saves its critic. If None, there is no
            callback that begins or ends that phase: the module stays in the phase that it has.
        stored: the rollouts whose held-out part tells when value pretraining is over. If None, it
            is over after its number of iterations, or once its stop limits are met.
        trained: the networks that minibatches may train: `actor`, `critic` or both. One that is not
            named stays as it is.
        safe_point: called between the stages of an iteration. It raises an exception to stop the
            run.
    """
    config, observers, truths = module.config, list[Observer](), None
    if config.value_truth.every_n_iterations is not None:
        observers.append(truths := ValueTruths(config, progress))
    if config.critic.head.start == "first_batch":
        observers.append(HeadStart(module, progress))
    datamodule = RolloutDataModule(
        config,
        make_rollouts,
        progress=progress,
        observers=observers,
        trained=trained,
        safe_point=safe_point,
    )
    callbacks: list[Callback] = [WeightSync()]
    if critic_dir is not None:
        pretraining = ValuePretraining(
            config.components.value_pretraining,
            num_iterations=num_pretraining_iterations(module),
            critic_dir=critic_dir,
            progress=progress,
            stored=stored,
        )
        callbacks.insert(0, pretraining)
    return TrainingParts(module, datamodule, callbacks, trainer_options(module), truths)


def num_pretraining_iterations(module: VapoModule) -> int:
    """Return the largest possible number of value-pretraining iterations (0 without a critic)."""
    return module.hyperparameters.value_pretraining_iterations if module.has_critic else 0


def trainer_options(module: VapoModule) -> dict[str, Any]:
    """Return the arguments of `L.Trainer` that follow from the config, one epoch an iteration."""
    config = module.config
    phases_differ = len({num_steps(config, phase) for phase in Phase}) > 1
    return {
        "accelerator": config.trainer.accelerator,
        "devices": config.trainer.devices,
        "num_nodes": config.trainer.num_nodes,
        "strategy": make_strategy(config.trainer),
        "precision": lightning_precision(config.trainer),
        "max_epochs": num_pretraining_iterations(module) + config.training.num_iterations,
        "use_distributed_sampler": False,
        "reload_dataloaders_every_n_epochs": int(phases_differ),
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
