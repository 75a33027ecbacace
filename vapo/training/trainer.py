"""Lightning's Trainer, with a run's callbacks in the order in which they must come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from vapo.rollouts.kept_rollouts import KeptRollouts
from vapo.runs.other_processes import Peers
from vapo.runs.run_dirs import RunDir
from vapo.runs.stopping import Stopping
from vapo.system.private_attributes import leave_signals_alone
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks.checkpointing import Checkpointing, OwnStates
from vapo.training.callbacks.diagnostics import DiagnosticTables, Evaluation, ValuePages
from vapo.training.callbacks.profiling import Profiling
from vapo.training.callbacks.recording import Recording, Watch
from vapo.training.parts import TrainingParts


class StopAtSafePoints(Callback):
    """After each minibatch all processes agree; the datamodule does the same between stages."""

    def __init__(self, stopping: Stopping, peers: Peers) -> None:
        self.stopping = stopping
        self.peers = peers

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.peers.watch(getattr(trainer.strategy.launcher, "procs", []))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self.stopping.safe_point()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.peers.close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self.stopping.requested:
            self.peers.close()


class RunCallbacks:
    """A run's callbacks: by name those that the command needs afterwards, all in `in_order`."""

    def __init__(
        self,
        parts: TrainingParts,
        run_dir: RunDir,
        logger: RunLogger,
        progress: Progress,
        tokenizer: PreTrainedTokenizerBase,
        stopping: Stopping,
        kept: KeptRollouts | None = None,
    ) -> None:
        config = parts.module.config
        self.peers = Peers()
        self.evaluation = Evaluation(logger, progress)
        self.recording = Recording(logger, progress)
        self.watch = Watch(config.watch, parts.module.faults, run_dir, logger, progress)
        self.checkpointing = Checkpointing(
            run_dir,
            logger,
            every_n_iterations=config.trainer.checkpoint_every_n_iterations,
            keep=config.checkpoints.keep,
            in_background=config.checkpoints.save_in_background,
            held=lambda: self.watch.holds_checkpoint,
            note=progress.note,
            kept=kept,
        )
        self.in_order: list[Callback] = [
            StopAtSafePoints(stopping, self.peers),
            *parts.callbacks,
            self.evaluation,
            ValuePages(logger, tokenizer, progress, parts.truths),
            self.recording,
            self.watch,
            DiagnosticTables(logger, parts.truths),
            self.checkpointing,
        ]
        if config.trainer.profile:
            self.in_order.append(Profiling(run_dir.path, progress))

    def add(self, own: Sequence[Callback]) -> None:
        """The user's own: before a checkpoint is written, which then has what they did."""
        place = self.in_order.index(self.checkpointing)
        self.in_order[place:place] = [*own, OwnStates(own)] if own else []


def make_trainer(
    parts: TrainingParts, callbacks: Sequence[Callback], logger: RunLogger
) -> L.Trainer:
    """Make the Trainer of a run."""
    trainer = L.Trainer(
        **parts.trainer_options,
        logger=logger,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    leave_signals_alone(trainer)
    return trainer
