"""Stop a run at a safe point after a signal, and end it when another process is lost."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.runs.stopping import Peers, Stopping


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
