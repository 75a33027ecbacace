"""The Trainer of a study's short trainings, of which nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger

from vapo.config import FitConfig
from vapo.training.strategy import lightning_precision


def make_short_trainer(
    config: FitConfig,
    callbacks: Sequence[Callback],
    *,
    num_iterations: int,
    reload_every_n_epochs: int = 0,
) -> L.Trainer:
    """Make a Trainer of one process without records, checkpoints and a display."""
    return L.Trainer(
        accelerator=config.trainer.accelerator,
        devices=1,
        precision=lightning_precision(config.trainer),
        max_epochs=num_iterations,
        reload_dataloaders_every_n_epochs=reload_every_n_epochs,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=DummyLogger(),
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
