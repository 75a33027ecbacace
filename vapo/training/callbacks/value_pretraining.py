"""The value-pretraining phase and the switch to the policy phase."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.config import components
from vapo.networks.export import save_network
from vapo.rollouts.stored_rollouts import StoredRollouts
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import mean_of_steps
from vapo.training.datamodule import iteration_of
from vapo.training.heldout_critic import BestCritic
from vapo.training.module import VapoModule
from vapo.training.optimizers import stepper
from vapo.types import Phase


class ValuePretraining(Callback):
    """Owns the phase: critic only, on Monte-Carlo returns of the fixed initial policy.

    The phase ends after `num_iterations`, or earlier once the stop rule is met; then the
    critic is saved to `critic_dir`, from which other runs can start (`critic.init`), unless its
    head is of the user's own, and the policy phase begins. 0 iterations (the component is off):
    the phase never begins. With `stored` rollouts (`data`) the held-out explained variance is
    measured after each pass over them, and the phase ends with its best weights.

    Source: VAPO 4.1; VC-PPO 3.2.
    """

    def __init__(
        self,
        settings: components.ValuePretraining,
        *,
        num_iterations: int,
        critic_dir: Path,
        progress: Progress,
        stored: StoredRollouts | None = None,
    ) -> None:
        self.settings = settings
        self.num_iterations = num_iterations
        self.critic_dir = critic_dir
        self.progress = progress
        self.stored = stored
        self.best = BestCritic(settings)

    def state_dict(self) -> dict[str, Any]:
        return self.best.state_dict() if self.settings.data is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best.load_state_dict(state_dict)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.stored is not None:
            self.best.begin(self.stored)

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
        is_last = finished >= self.num_iterations or self.stop_rule_met(
            finished, explained_variance=explained_variance, value_loss=value_loss
        )
        if not self.measure_passes(trainer, pl_module, finished, is_last=is_last) and not is_last:
            return
        pl_module.phase = Phase.POLICY_OPTIMIZATION
        assert pl_module.critic is not None
        if self.best.weights:
            self.best.restore(pl_module, stepper(pl_module, "critic")[0].optimizer)
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

    def measure_passes(
        self, trainer: L.Trainer, module: VapoModule, finished: int, *, is_last: bool
    ) -> bool:
        """Measure the critic after a pass over stored rollouts; whether the phase ends by it."""
        stored = self.stored
        if stored is None or not self.best.due(stored, finished, is_last=is_last):
            return False
        optimizer = stepper(module, "critic")[0].optimizer
        found = self.best.measure(module, optimizer, stored, finished)
        if found is not None:
            assert trainer.logger is not None
            metrics = {"critic/heldout_explained_variance": found}
            trainer.logger.log_metrics(metrics, step=trainer.global_step)
            self.progress.note(
                f"value pretraining, {self.best.passes} passes: held-out explained variance "
                f"{found:.3f}, best {self.best.best:.3f} after {self.best.best_pass}"
            )
        return self.best.is_over()

    def stop_rule_met(self, finished: int, *, explained_variance: float, value_loss: float) -> bool:
        """Whether every stop limit that is set is met, after at least `min_iterations`."""
        least, most = self.settings.stop_explained_variance, self.settings.stop_value_loss
        if (least is None and most is None) or finished < self.settings.min_iterations:
            return False
        return (least is None or explained_variance >= least) and (
            most is None or value_loss <= most
        )
