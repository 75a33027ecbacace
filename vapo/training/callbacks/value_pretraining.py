"""The value-pretraining phase and the switch to the policy phase."""

from __future__ import annotations

import math
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.config import components
from vapo.networks.export import save_network
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import mean_of_steps
from vapo.training.datamodule import iteration_of
from vapo.training.module import VapoModule
from vapo.types import Phase


class ValuePretraining(Callback):
    """Owns the phase: critic only, on Monte-Carlo returns of the fixed initial policy.

    The phase ends after `num_iterations`, or earlier once the stop rule is met; then the
    critic is saved to `critic_dir`, from which other runs can start (`critic.init`), unless its
    head is of the user's own, and the policy phase begins. 0 iterations (the component is off):
    the phase never begins.

    Source: VAPO 4.1; VC-PPO 3.2.
    """

    def __init__(
        self,
        settings: components.ValuePretraining,
        *,
        num_iterations: int,
        critic_dir: Path,
        progress: Progress,
    ) -> None:
        self.settings = settings
        self.num_iterations = num_iterations
        self.critic_dir = critic_dir
        self.progress = progress

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin the phase. A restored checkpoint overwrites it with its own phase."""
        assert isinstance(pl_module, VapoModule)
        if self.num_iterations > 0:
            pl_module.phase = Phase.VALUE_PRETRAINING

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        if pl_module.phase is not Phase.VALUE_PRETRAINING:
            return
        iteration = iteration_of(trainer)
        finished = iteration.number
        explained_variance = iteration.metrics["critic/explained_variance"]
        losses = mean_of_steps(pl_module.minibatch_metrics)
        value_loss = losses.get("critic/value_loss", math.nan)  # none, if nothing was trained on
        if finished < self.num_iterations and not self.stop_rule_met(
            finished, explained_variance=explained_variance, value_loss=value_loss
        ):
            return
        pl_module.phase = Phase.POLICY_OPTIMIZATION
        assert pl_module.critic is not None
        saved = f"critic saved to {self.critic_dir}"
        if pl_module.config.critic.head_function is None:
            save_network(
                pl_module.critic,
                pl_module.config.actor.path,
                self.critic_dir,
                lora=pl_module.config.critic.lora,
            )
        else:  # which no model folder has a place for
            saved = "the critic is in the checkpoints alone, with its critic.head_function"
        self.progress.note(
            f"value pretraining ended after {finished} iterations: explained variance "
            f"{explained_variance:.3f}, value loss {value_loss:.3f}; "
            f"{saved}"
        )

    def stop_rule_met(self, finished: int, *, explained_variance: float, value_loss: float) -> bool:
        """Whether every stop limit that is set is met, after at least `min_iterations`."""
        least, most = self.settings.stop_explained_variance, self.settings.stop_value_loss
        if (least is None and most is None) or finished < self.settings.min_iterations:
            return False
        return (least is None or explained_variance >= least) and (
            most is None or value_loss <= most
        )
