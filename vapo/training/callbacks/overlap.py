"""Rollouts of the next iteration, sampled while this one trains."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.training.datamodule import datamodule_of


class RolloutOverlap(Callback):
    """Begins sampling ahead when training begins, and waits for it when training ends.

    Must come first: behind it the phase may change, the engine gets new weights, and the
    evaluation uses engine and scorer.
    """

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        datamodule_of(trainer).sample_ahead()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        datamodule_of(trainer).wait_for_samples()
