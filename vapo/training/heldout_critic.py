"""What the critic knows of rollouts that it is not trained on, and the best of its states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vapo.advantages.credit import achieved_returns, value_places
from vapo.advantages.estimators import estimate_advantages
from vapo.config.components import ValuePretraining
from vapo.errors import UserError
from vapo.functional.metrics import explained_variance
from vapo.rollouts.stored_rollouts import KEY, StoredRollouts
from vapo.training.module import VapoModule
from vapo.training.optimizers import copy_of_moments, put_moments
from vapo.types import Phase, RolloutBatch, TrainingBatch


def evaluated_returns(module: VapoModule, batch: RolloutBatch) -> tuple[TrainingBatch, Tensor]:
    """The batch with the critic's values, and the Monte-Carlo return of each token or turn [B, T],
    of the rewards that the value targets add up."""
    evaluated = module.evaluate_rollouts(batch, Phase.VALUE_PRETRAINING, with_entropy=False)
    training = estimate_advantages(evaluated, Phase.VALUE_PRETRAINING, module.config)
    rewards = training.value_rewards
    return training, achieved_returns(batch, rewards, module.hyperparameters)


def heldout_explained_variance(module: VapoModule, stored: StoredRollouts) -> float:
    """1 - Var(R - V) / Var(R) over all tokens (or turns) of the held-out rollouts.

    R is the Monte-Carlo return, V the critic's value now; nan where all R are equal.
    """
    batch, returns = evaluated_returns(module, stored.heldout_batch())
    assert batch.old_values is not None
    places = value_places(batch, module.hyperparameters)
    return float(explained_variance(batch.old_values, returns, places))


class BestCritic:
    """The held-out explained variance after each pass, the best weights, and when to stop.

    With the weights the optimizer's moments are kept: those of later passes would push the best
    weights on towards the ones that were given up. So the critic is as if training had ended
    with its best pass. The state is part of the checkpoint, so that a resumed run ends in the same
    weights.
    """

    def __init__(self, settings: ValuePretraining) -> None:
        self.settings = settings
        self.best = -torch.inf
        self.passes = self.best_pass = 0
        self.weights: dict[str, Tensor] = {}
        self.moments: list[dict[str, Tensor]] = []
        self.digest = ""

    def begin(self, stored: StoredRollouts) -> None:
        """Remember the file from the run's first step on, so that every checkpoint names it.

        Raises: UserError where a resumed run reads another file than it began with.
        """
        if self.digest and self.digest != stored.digest:
            raise UserError(
                f"{KEY} {stored.name}: the file is not the one that the run began with (its "
                f"digest is {stored.digest}, not {self.digest}); give that one, or begin a new run"
            )
        self.digest = stored.digest

    def due(self, stored: StoredRollouts, finished: int, *, is_last: bool) -> bool:
        """Whether a pass ends with the iteration, or the phase does."""
        return is_last or stored.passes(finished) > stored.passes(finished - 1)

    def measure(
        self, module: VapoModule, optimizer: Optimizer, stored: StoredRollouts, finished: int
    ) -> float | None:
        """The held-out explained variance, kept with the weights and moments where it is the best;
        None where nothing is held out."""
        self.passes = stored.passes(finished)
        if not stored.heldout:
            return None
        assert module.critic is not None
        found = heldout_explained_variance(module, stored)
        if found > self.best:
            self.best, self.best_pass = found, self.passes
            state = module.critic.state_dict()
            self.weights = {name: tensor.detach().clone() for name, tensor in state.items()}
            self.moments = copy_of_moments(optimizer)
        return found

    def is_over(self) -> bool:
        """Whether the passes are done, or have brought nothing for as long as is waited."""
        epochs, patience = self.settings.epochs, self.settings.patience
        return (epochs is not None and self.passes >= epochs) or (
            patience is not None and self.passes - self.best_pass >= patience
        )

    def restore(self, module: VapoModule, optimizer: Optimizer) -> None:
        """Give the critic its best weights back, and its optimizer the moments of their pass."""
        assert module.critic is not None
        module.critic.load_state_dict(self.weights)
        if self.moments:  # a checkpoint of an earlier version has none
            put_moments(optimizer, self.moments)
        self.weights, self.moments = {}, []

    def state_dict(self) -> dict[str, Any]:
        names = ("best", "passes", "best_pass", "weights", "moments", "digest")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
