"""Tables of values and advantages by token position, as artifacts of the run."""

from __future__ import annotations

import json

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.datamodule import datamodule_of
from vapo.module import VapoModule
from vapo.tracking import RunLogger
from vapo.types import Phase


class PositionDiagnostics(Callback):
    """Writes `diagnostics/positions_iteration_0001.json`.

    At the first and last iteration of each phase and, in both, at every
    `evaluation.every_n_iterations`-th. The numbers are of the iteration's rollouts: from before
    its update. Must come after `ValuePretraining`, which ends the phase.
    """

    def __init__(self, logger: RunLogger) -> None:
        self.logger = logger

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        datamodule = datamodule_of(trainer)
        if not datamodule.positions or not self.is_due(pl_module):
            return
        iteration = int(pl_module.iteration) + 1
        table = {
            "iteration": iteration,
            "phase": pl_module.trained_phase.value,
            "policy_steps": pl_module.policy_steps_before,
            "columns": datamodule.positions,
        }
        self.logger.log_text(
            json.dumps(table), f"diagnostics/positions_iteration_{iteration:04d}.json"
        )

    def is_due(self, module: VapoModule) -> bool:
        """`policy_iterations` and `iteration` do not count this iteration yet."""
        if in_policy_phase(module):
            finished = int(module.policy_iterations) + 1
            is_last = finished >= module.config.training.num_iterations
        else:
            finished = int(module.iteration) + 1
            is_last = module.phase is Phase.POLICY_OPTIMIZATION
        is_nth = finished % module.config.evaluation.every_n_iterations == 0
        return finished == 1 or is_last or is_nth


def in_policy_phase(module: VapoModule) -> bool:
    return module.trained_phase is Phase.POLICY_OPTIMIZATION
