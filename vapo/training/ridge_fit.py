"""Fits a critic's linear weights by a ridge regression on the last rollout batches
(`critic.ridge`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.value_loss_columns import predicted_targets
from vapo.config.critic import CriticConfig, RidgeConfig
from vapo.functional.regression import ridge_of_gram, weighted_gram
from vapo.networks.actor_critic import Critic, members_of
from vapo.networks.fitted_weights import (
    current_fitted_weights,
    fitted_inputs,
    fitted_parameters,
    put_fitted,
)
from vapo.networks.probe import ProbeForSequenceClassification
from vapo.system.distributed import sum_over_ranks
from vapo.training.minibatches import Microbatch


class RidgeFit:
    """Refits a critic's linear weights at the end of each iteration, by ridge regression.

    Its methods are called in the order

        add (each micro-batch) -> keep or drop (each minibatch) -> refit (after the last)

    The regression uses the tokens with value loss of the last `window_batches` rollout batches,
    with their weights in the value loss. The values of a rollout batch thus come from weights that
    were fitted before it was sampled. Only the Gram matrix of each batch is kept, [M, F+2, F+2] for
    M critics and F features. `grams` are those of the last batches, oldest first, summed over all
    ranks. A checkpoint holds them, so that a resumed run fits the same weights.

    If the linear weights stand beside a network, the regression fits the difference between the
    targets and the network's own score. The score is the one that the network gave when the batch
    was added, so the fit lags behind a changing network, by up to the window.
    """

    def __init__(self, config: CriticConfig) -> None:
        assert config.ridge is not None
        self.options: RidgeConfig = config.ridge
        self.num_critics = config.count
        self.grams: list[Tensor] = []
        self._of_batch: Tensor | None = None  # of this rank
        self._of_minibatch: Tensor | None = None
        self._previous_weights: dict[int, tuple[Tensor, Tensor]] = {}  # fitted weights, by critic

    def state_dict(self) -> dict[str, Any]:
        return {"grams": list(self.grams)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.grams = list(state["grams"])

    def num_bytes(self, critic: Critic) -> int:
        """Return the bytes of the Gram matrices of `window_batches` batches."""
        model = members_of(critic)[0].model
        weights = [p for name, p in fitted_parameters(model).items() if name.endswith("weight")]
        size = sum(weight.shape[1] for weight in weights) + 2
        return self.options.window_batches * self.num_critics * size**2 * 8

    @torch.no_grad()
    def add(self, critic: Critic, micro: Microbatch, values: Float[Tensor, "b T"]) -> None:
        """Add the tokens with value loss of a micro-batch to the minibatch's Gram matrix.

        `values` are the critic's values of the micro-batch. Every rank must call this equally
        often.
        """
        rows, members = micro.rows, micro.rows.critic_members
        index = 0 if members is None else int(members[0])
        member, sampled = members_of(critic)[index], micro.inputs.response_mask
        features = fitted_inputs(member, micro.inputs)
        targets = predicted_targets(rows)[sampled]
        if not isinstance(member.model, ProbeForSequenceClassification):
            if index not in self._previous_weights:
                self._previous_weights[index] = current_fitted_weights(member)
            weights, bias = self._previous_weights[index]
            targets = targets - (values[sampled] - features @ weights - bias)
        counted = rows.value_mask[sampled]
        token_weights = (rows.value_weights[:, None] * rows.value_draws)[sampled]
        gram = weighted_gram(features[counted], targets[counted], token_weights[counted])
        if self._of_minibatch is None:
            self._of_minibatch = gram.new_zeros(self.num_critics, *gram.shape)
        self._of_minibatch[index] += gram

    def keep(self) -> None:
        """Add the minibatch's Gram matrix to the iteration's, because its numbers are finite."""
        if self._of_minibatch is not None:
            batch = self._of_batch
            self._of_batch = self._of_minibatch if batch is None else batch + self._of_minibatch
        self._of_minibatch = None

    def drop(self) -> None:
        """Drop the minibatch's Gram matrix, because some of its numbers are not finite."""
        self._of_minibatch = None

    def refit(self, critic: Critic) -> dict[str, float]:
        """Fit the weights to the last `window_batches` batches, and return metrics.

        A critic's weights stay as they are if the iteration added no token or the window has none
        for it. Every rank must call this.
        """
        batch, self._of_batch = self._of_batch, None
        self._previous_weights = {}
        if batch is None:
            return {}
        self.grams.append(sum_over_ranks(batch).cpu())
        self.grams = self.grams[-self.options.window_batches :]
        total, explained = torch.stack(self.grams).sum(dim=0), []
        for member, gram in zip(members_of(critic), total, strict=True):
            if float(gram[-1, -1]) > 0:
                solution = ridge_of_gram(gram, penalty=self.options.penalty)
                put_fitted(member, solution)
                explained.append(solution.explained)
        return {
            "critic/ridge_num_tokens": float(total[:, -1, -1].sum()),
            "critic/ridge_explained_variance": (
                math.fsum(explained) / len(explained) if explained else math.nan
            ),
        }
