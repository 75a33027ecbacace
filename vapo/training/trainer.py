"""Lightning's Trainer, with a run's callbacks in the order in which they must come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.runs.other_processes import Peers
from vapo.runs.run_dirs import RunDir
from vapo.runs.stopping import Stopping
from vapo.system.private_attributes import leave_signals_alone
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks.checkpointing import Checkpointing
from vapo.training.callbacks.diagnostics import PositionDiagnostics, ValuePages, ValueTruths
from vapo.training.callbacks.evaluation import Evaluation
from vapo.training.callbacks.own_states import OwnStates
from vapo.training.callbacks.profiling import Profiling
from vapo.training.callbacks.recording import Recording
from vapo.training.callbacks.stopping import StopAtSafePoints
from vapo.training.callbacks.value_pretraining import ValuePretraining
from vapo.training.callbacks.watch import Watch
from vapo.training.callbacks.weight_sync import WeightSync
from vapo.training.module import VapoModule
from vapo.training.schedule import phases_differ
from vapo.training.strategy import lightning_precision, make_strategy


def num_pretraining_iterations(module: VapoModule) -> int:
    return module.hyperparameters.value_pretraining_iterations if module.has_critic else 0


class RunCallbacks:
    """A run's callbacks: by name those that the command needs afterwards, all in `in_order`."""

    def __init__(
        self,
        config: FitConfig,
        module: VapoModule,
        run_dir: RunDir,
        logger: RunLogger,
        progress: Progress,
        tokenizer: PreTrainedTokenizerBase,
        stopping: Stopping,
    ) -> None:
        self.peers = Peers()
        self.evaluation = Evaluation(logger, progress)
        self.recording = Recording(logger, progress)
        self.watch = Watch(config.watch, module.faults, run_dir, logger, progress)
        self.checkpointing = Checkpointing(
            run_dir,
            logger,
            every_n_iterations=config.trainer.checkpoint_every_n_iterations,
            keep=config.checkpoints.keep,
            in_background=config.checkpoints.save_in_background,
            held=lambda: self.watch.holds_checkpoint,
            note=progress.note,
        )
        self.in_order: list[Callback] = [
            StopAtSafePoints(stopping, self.peers),
            ValuePretraining(
                config.components.value_pretraining,
                num_iterations=num_pretraining_iterations(module),
                critic_dir=run_dir.path / "pretrained_critic",
                progress=progress,
            ),
            WeightSync(progress),
            self.evaluation,
            ValuePages(logger, tokenizer, progress),
            self.recording,
            self.watch,
            PositionDiagnostics(logger),
            ValueTruths(logger),
            self.checkpointing,
        ]
        if config.trainer.profile:
            self.in_order.append(Profiling(run_dir.path, progress))

    def add(self, own: Sequence[Callback]) -> None:
        """The user's own: before a checkpoint is written, which then has what they did."""
        place = self.in_order.index(self.checkpointing)
        self.in_order[place:place] = [*own, OwnStates(own)]


def trainer_options(config: FitConfig, module: VapoModule) -> dict[str, Any]:
    """The arguments of `L.Trainer` that follow from the config: one epoch is one iteration."""
    return {
        "accelerator": config.trainer.accelerator,
        "devices": config.trainer.devices,
        "num_nodes": config.trainer.num_nodes,
        "strategy": make_strategy(config.trainer),
        "precision": lightning_precision(config.trainer),
        "max_epochs": num_pretraining_iterations(module) + config.training.num_iterations,
        "use_distributed_sampler": False,
        "reload_dataloaders_every_n_epochs": int(phases_differ(config)),
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }


def make_trainer(
    config: FitConfig, module: VapoModule, callbacks: RunCallbacks, logger: RunLogger
) -> L.Trainer:
    """Make the Trainer of a run."""
    trainer = L.Trainer(
        **trainer_options(config, module),
        logger=logger,
        callbacks=callbacks.in_order,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    leave_signals_alone(trainer)
    return trainer
