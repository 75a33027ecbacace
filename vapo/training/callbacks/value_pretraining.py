"""Runs the value-pretraining phase, keeps its best critic, and switches to the policy phase."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from vapo.advantages.credit import achieved_returns, value_token_mask
from vapo.advantages.estimators import estimate_advantages
from vapo.config import FitConfig, components
from vapo.errors import UserError
from vapo.functional.metrics import explained_variance
from vapo.networks.actor_critic import Critic, members_of
from vapo.networks.export import network_folders, save_network
from vapo.prompts.fingerprint import fingerprint
from vapo.rollouts.stored_rollouts import KEY, RolloutDataset
from vapo.runs.checkpoint_saving import AFTER_A_SAVE, run_on_all_ranks
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import mean_of_steps
from vapo.training.datamodule import datamodule_of, iteration_of
from vapo.training.iteration import Iteration
from vapo.training.module import VapoModule
from vapo.training.optimizers import copy_of_moments, put_moments, stepper
from vapo.types import Phase, RolloutBatch, TrainingBatch


@dataclass(eq=False)
class ValuePretraining(Callback):
    """Begins and ends the phase in which the critic alone is trained, on Monte-Carlo returns of the
    initial policy, which does not change.

    The phase ends after `num_iterations`, or earlier once the stop rule is met. Then the critic is
    saved to `critic_dir`, from which other runs can start (`critic.init`), and the policy phase
    begins. A critic whose head is a user's function is not saved there. With 0 iterations (the
    component is off) the phase never begins.

    With `stored` rollouts (`data`) the held-out explained variance is measured after each pass over
    them, and the phase ends with the weights of the best pass.

    If no response has trained the critic, the run ends with a UserError before anything is saved.
    The last checkpoint is then from the iteration before, so a run that is resumed with another
    filter trains the critic in that iteration again.

    Source: VAPO 4.1; VC-PPO 3.2.
    """

    settings: components.ValuePretraining
    num_iterations: int
    critic_dir: Path
    progress: Progress
    stored: RolloutDataset | None = None

    def __post_init__(self) -> None:
        self.best = BestCritic(self.settings)
        self.has_trained = False

    def state_dict(self) -> dict[str, Any]:
        best = self.best.state_dict() if self.settings.data is not None else {}
        return {"has_trained": self.has_trained, **best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = dict(state_dict)
        self.has_trained = best.pop("has_trained", True)
        if best:
            self.best.load_state_dict(best)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        if self.stored is not None:
            self.best.begin(self.stored)
            if pl_module.phase is Phase.VALUE_PRETRAINING and pl_module.config.critic.reads_actor:
                datamodule_of(trainer).runner.sleep()  # the actor gets an engine's memory
                compute_states(pl_module, self.stored)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Set the module's phase to value pretraining. A restored checkpoint overwrites it."""
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
        self.has_trained |= math.isfinite(value_loss)
        is_last = finished >= self.num_iterations or self.stop_rule_met(
            finished, explained_variance=explained_variance, value_loss=value_loss
        )
        is_over = self.measure_passes(iteration, pl_module, finished, is_last=is_last)
        if not is_over and not is_last:
            return
        if not self.has_trained:
            raise UserError(nothing_trained(pl_module.config, finished))
        pl_module.phase = Phase.POLICY_OPTIMIZATION
        if self.stored is not None:
            self.stored.free_states()
        critic = pl_module.critic
        assert critic is not None
        if self.best.weights:
            self.best.restore(pl_module, stepper(pl_module, "critic")[0].optimizer)
        saved = f"critic saved to {self.critic_dir}"
        if pl_module.config.critic.head_function is None:
            config = pl_module.config
            for member in members_of(critic) if config.critic.kind != "network" else ():
                member.model.config.actor_fingerprint = fingerprint(config.actor.path)
            self._save(critic, config)
        else:  # which no model folder has a place for
            saved = "the critic is in the checkpoints alone, with its critic.head_function"
        self.progress.note(
            f"value pretraining ended after {finished} iterations: in its last batch "
            f"explained variance {explained_variance:.3f}, value loss {value_loss:.3f}; {saved}"
        )

    def _save(self, critic: Critic, config: FitConfig) -> None:
        """Write a model folder for the critic, or one for each of several.

        A disk may fill up between two of them, so all processes wait for each other after each.

        Raises: InterruptedRunError on all processes: a folder cannot be written.
        """
        for folder, member in network_folders(critic, self.critic_dir).items():
            write = partial(
                save_network, member, config.actor.path, folder, lora=config.critic.lora
            )
            run_on_all_ranks(
                write, f"cannot write the pretrained critic {folder}", after=AFTER_A_SAVE
            )

    def measure_passes(
        self, iteration: Iteration, module: VapoModule, finished: int, *, is_last: bool
    ) -> bool:
        """If the iteration ends a pass over stored rollouts, measure the explained variance.

        It is added to the iteration's metrics.

        Returns: whether the phase must end now, because all passes are done or the last ones were
            no better.
        """
        stored = self.stored
        if stored is None or not self.best.due(stored, finished, is_last=is_last):
            return False
        optimizer = stepper(module, "critic")[0].optimizer
        explained_variance = self.best.measure(module, optimizer, stored, finished)
        if explained_variance is not None:
            iteration.metrics["critic/heldout_explained_variance"] = explained_variance
            self.progress.note(
                f"value pretraining, {self.best.passes} passes: held-out explained variance "
                f"{explained_variance:.3f}, best {self.best.best:.3f} after {self.best.best_pass}"
            )
        return self.best.is_over()

    def stop_rule_met(self, finished: int, *, explained_variance: float, value_loss: float) -> bool:
        """Whether all stop limits are met after at least `min_iterations`; False if none is set."""
        min_explained_variance, max_value_loss = (
            self.settings.stop_explained_variance,
            self.settings.stop_value_loss,
        )
        if (
            min_explained_variance is None and max_value_loss is None
        ) or finished < self.settings.min_iterations:
            return False
        return (
            min_explained_variance is None or explained_variance >= min_explained_variance
        ) and (max_value_loss is None or value_loss <= max_value_loss)


def nothing_trained(config: FitConfig, finished: int) -> str:
    """Return the error message for a value pretraining in which no response carried value loss."""
    filters = config.rewards.overlong.filter_truncated and config.critic.truncated == "as_policy"
    reason, fix = "the lines of its iterations say why", "mend that"
    if filters:
        reason = "rewards.overlong.filter_truncated leaves truncated responses out"
        fix = "set critic.truncated=train, or rewards.overlong.filter_truncated=false"
    elif config.critic.truncated == "leave_out":
        reason = "critic.truncated leave_out leaves truncated responses out"
        fix = "set critic.truncated=train"
    if filters or config.critic.truncated == "leave_out":
        fix += ", or raise rollouts.max_response_tokens so that some responses end"
    return (
        f"value pretraining has not trained the critic in any of its {finished} iterations, "
        f"because no response carried value loss: {reason}. The policy would be trained on the "
        f"values of a critic that has learned nothing: {fix}, and begin a new run"
    )


def compute_states(module: VapoModule, stored: RolloutDataset) -> None:
    """Compute and store the actor's hidden states on stored rollouts, if the critic reads them.

    The actor must still have its initial weights.
    """
    if not module.config.critic.reads_actor:
        return

    def states_of(batch: RolloutBatch) -> list[Tensor]:
        evaluated = module.add_logprobs_and_values(
            batch, Phase.VALUE_PRETRAINING, with_entropy=False
        )
        assert evaluated.actor_states is not None
        return evaluated.actor_states

    stored.compute_states(states_of)


def explained_now(module: VapoModule, batch: RolloutBatch) -> tuple[TrainingBatch, float]:
    """Compute the critic's current values V of a batch, and its explained variance.

    Returns: the batch with the values, and the explained variance 1 - Var(R - V) / Var(R) over
        tokens or turns. R is the Monte-Carlo return of the critic's rewards. The variance is nan if
        all R are equal.
    """
    evaluated = module.add_logprobs_and_values(batch, Phase.VALUE_PRETRAINING, with_entropy=False)
    evaluated = replace(evaluated, actor_states=None)  # no update follows, and they are large
    training = estimate_advantages(evaluated, Phase.VALUE_PRETRAINING, module.config)
    hp = module.hyperparameters
    returns, places = (
        achieved_returns(batch, training.value_rewards, hp),
        value_token_mask(batch, hp),
    )
    return training, float(explained_variance(training.values, returns, places))


@dataclass
class BestCritic:
    """Keeps the critic of the pass with the largest held-out explained variance.

    It keeps the weights, the optimizer's moments and the Gram matrices of `critic.ridge`, so that
    after `restore` the critic is as if training had ended with that pass. (Moments of later passes
    would push the weights towards those that were given up.) The state is part of the checkpoint,
    so that a resumed run ends with the same weights.
    """

    settings: components.ValuePretraining
    best: float = -torch.inf
    passes: int = 0
    best_pass: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: list[dict[str, Tensor]] = field(default_factory=list)
    ridge: dict[str, Any] = field(default_factory=dict)
    digest: str = ""

    def begin(self, stored: RolloutDataset) -> None:
        """Remember the digest of the stored rollouts, so that every checkpoint names them.

        Raises: UserError: a resumed run reads another file than the one that it began with.
        """
        if self.digest and self.digest != stored.digest:
            raise UserError(
                f"{KEY} {stored.name}: the file is not the one that the run began with (its "
                f"digest is {stored.digest}, not {self.digest}); give that one, or begin a new run"
            )
        self.digest = stored.digest

    def due(self, stored: RolloutDataset, finished: int, *, is_last: bool) -> bool:
        """Whether to measure the critic now: the iteration ends a pass, or the phase."""
        return is_last or stored.passes(finished) > stored.passes(finished - 1)

    def measure(
        self, module: VapoModule, optimizer: Optimizer, stored: RolloutDataset, finished: int
    ) -> float | None:
        """Return the held-out explained variance, or None if no rollouts are held out. Keep the
        critic if it is the best so far."""
        self.passes = stored.passes(finished)
        if not stored.heldout:
            return None
        _, explained_variance = explained_now(module, stored.heldout_batch())
        if explained_variance > self.best:
            self.best, self.best_pass = explained_variance, self.passes
            state = module.get_submodule("critic").state_dict()
            self.weights = {name: tensor.detach().clone() for name, tensor in state.items()}
            self.moments = copy_of_moments(optimizer)
            self.ridge = {} if module.ridge is None else module.ridge.state_dict()
        return explained_variance

    def is_over(self) -> bool:
        """Whether all passes are done, or the last `patience` ones were no better."""
        epochs, patience = self.settings.epochs, self.settings.patience
        return (epochs is not None and self.passes >= epochs) or (
            patience is not None and self.passes - self.best_pass >= patience
        )

    def restore(self, module: VapoModule, optimizer: Optimizer) -> None:
        """Restore the critic's weights and its optimizer's moments from the best pass."""
        module.get_submodule("critic").load_state_dict(self.weights)
        if self.moments:  # a checkpoint of an earlier version has none
            put_moments(optimizer, self.moments)
        if self.ridge and module.ridge is not None:
            module.ridge.load_state_dict(self.ridge)
        self.weights, self.moments, self.ridge = {}, [], {}

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "settings"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
