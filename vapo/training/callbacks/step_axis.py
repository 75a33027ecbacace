"""Sets where the charts' x axis begins: where the policy phase does, so that systems can be
compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.config import resolve
from vapo.tracking.logger import RunLogger
from vapo.training.datamodule import iteration_of
from vapo.training.minibatches import num_steps
from vapo.training.module import VapoModule
from vapo.types import Phase


@dataclass(eq=False)
class StepAxis(Callback):
    """Tells the logger at which trainer step the policy phase begins, which is 0 on the x axis.

    At first that is the step at which value pretraining is to end. If the phase ends earlier, that
    step is set then, so its charts end before 0. If it goes on for longer, as in a run that was
    resumed with more iterations of it, the policy phase begins above 0. A run that an earlier
    version began counts from its first minibatch, to its end. Must come after `Recording`, so that
    the last metrics of value pretraining are logged before the shift changes, and before the
    checkpointing.
    """

    logger: RunLogger

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, VapoModule)
        config, recorded = pl_module.config, self.logger.recorded_steps
        counts_from_first = (
            max(recorded.values(), default=0) > 0 and self.logger.first_recorded_step == 0
        )
        iterations = 0 if counts_from_first else resolve(config).value_pretraining_iterations
        self.logger.policy_begins_at = iterations * num_steps(config, Phase.VALUE_PRETRAINING)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Count from the first minibatch. A state in the checkpoint overwrites this."""
        self.logger.policy_begins_at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"policy_begins_at": self.logger.policy_begins_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.logger.policy_begins_at = state_dict["policy_begins_at"]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        if iteration_of(trainer).phase is not pl_module.phase:  # value pretraining has ended
            begins_at = min(self.logger.policy_begins_at, trainer.global_step)
            self.logger.policy_begins_at = begins_at
