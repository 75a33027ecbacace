"""After every update of the policy, the sampling engine gets its weights."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.datamodule import RolloutDataModule
from vapo.module import VapoModule
from vapo.progress import Progress
from vapo.strategies import full_state
from vapo.types import Phase


class WeightSync(Callback):
    """Push the actor's full weights into the sampler at the end of a policy iteration."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(datamodule, RolloutDataModule)
        if pl_module.phase is Phase.POLICY_OPTIMIZATION:
            with self.progress.stage("weight_sync"):
                datamodule.sampler.sync(full_state(pl_module.actor.model))
