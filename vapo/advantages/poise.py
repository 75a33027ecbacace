"""The baseline of POISE: a prompt's expected reward, predicted from its other responses' states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.critic_baseline import CriticBaseline
from vapo.advantages.trusted_baseline import TrustedBaseline
from vapo.config.algorithm import AlgorithmConfig, Trusted
from vapo.config.estimators import PoiseConfig, PoiseOptions
from vapo.errors import UserError
from vapo.functional.baselines import mean_of_others
from vapo.functional.critic_mixtures import gate_explained_variance
from vapo.functional.masking import response_means, zero_outside
from vapo.functional.regression import principal_components, ridge_predictions
from vapo.system.distributed import gather_over_ranks, sum_over_ranks
from vapo.types import EvaluatedBatch


class PoiseBaseline:
    """Predicts the expected rewards of POISE's baseline by a regression on earlier rollouts.

    A run has one. `features` [N, F] and `targets` [N] are those of the latest responses of all
    ranks, oldest first: a response's `response_features`, and the mean reward of its prompt's other
    responses. The regression is fitted anew in each iteration, before the iteration's responses are
    added. So no response of an iteration is in the fit of its baselines. A checkpoint has both
    tensors, so that a resumed run makes the same fit.
    """

    def __init__(self, config: PoiseConfig) -> None:
        self.config = config
        self.features, self.targets = torch.zeros(0, 0), torch.zeros(0)
        self.num_batches = 0
        self.metrics: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("features", "targets", "num_batches")}
        return state | {"read": [self.config.layer, self.config.num_states]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the regression's samples from a checkpoint.

        Raises: UserError: the checkpoint's features are of another layer or number of states.
        """
        features_read = [self.config.layer, self.config.num_states]
        if state["read"] != features_read:
            raise UserError(
                "algorithm.poise.layer and algorithm.poise.num_states are {} and {}, but the "
                "checkpoint's regression was fitted with {} and {}: set them as they were".format(
                    *features_read, *state["read"]
                )
            )
        self.features, self.targets = state["features"], state["targets"]
        self.num_batches = state["num_batches"]

    def weigh(
        self,
        advantages: Float[Tensor, "B T"],
        batch: EvaluatedBatch,
        token_rewards: Float[Tensor, "B T"],
        value_rewards: Float[Tensor, "B T"],
        *,
        gamma: float,
    ) -> Float[Tensor, "B T"]:
        """Return as advantage each response's reward less its baseline, on all of its tokens.

        The baseline is the mean over the prompt's other responses of the reward that the regression
        predicts from their features. In the first iterations `advantages`, which compare with those
        responses' mean reward, are returned unchanged. Then the batch's responses become samples of
        the regression. Every rank must call this. `value_rewards` and `gamma` are not read.
        """
        size = batch.group_size
        rewards, features = token_rewards.sum(dim=1), response_features(batch)
        others_mean = baseline = mean_of_others(rewards, group_size=size)
        num_fitted = len(self.targets) * (self.num_batches >= self.config.bootstrap_iterations)
        if num_fitted:
            predicted = self._predict(features).to(rewards.dtype)
            baseline = mean_of_others(predicted, group_size=size)
            against = (rewards - baseline)[:, None].expand(batch.response_mask.shape)
            advantages = zero_outside(against, batch.response_mask)
        explained = gate_explained_variance(baseline, rewards, reduce=sum_over_ranks)
        self.metrics = {
            "baseline/explained_variance": float(explained),
            "baseline/num_fitted_responses": float(num_fitted),
        }
        self._remember_responses(features, others_mean, batch)
        return advantages

    def _predict(self, features: Float[Tensor, "B F"]) -> Float[Tensor, " B"]:
        """Predict rewards from features by a ridge regression on their principal components."""
        config, samples, rows = self.config, self.features.double(), features.double()
        channels = rows.shape[1] // 2
        parts = [
            principal_components(samples[:, part], rows[:, part], count=count)
            for part, count in (
                (slice(channels), config.prompt_components),
                (slice(channels, 2 * channels), config.response_components),
            )
        ]
        parts.append((samples[:, -1:], rows[:, -1:]))
        samples, rows = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
        return ridge_predictions(samples, self.targets.double(), rows, ridge=config.ridge)

    def _remember_responses(
        self,
        features: Float[Tensor, "B F"],
        others_mean: Float[Tensor, " B"],
        batch: EvaluatedBatch,
    ) -> None:
        """Add a batch's responses of all ranks to the regression's samples, and drop the oldest.

        Responses without loss are left out: fillers, filtered ones, failed episodes. So are those
        with numbers that are not finite, which a batch that is not trained on may have.
        """
        is_counted = (
            batch.loss_mask.any(dim=1) & others_mean.isfinite() & features.isfinite().all(dim=1)
        )
        new = (
            gather_over_ranks(features[is_counted]),
            gather_over_ranks(others_mean[is_counted].float()),
        )
        if len(self.targets):
            new = torch.cat([self.features, new[0]]), torch.cat([self.targets, new[1]])
        self.features, self.targets = (x[-self.config.buffer_responses :].clone() for x in new)
        self.num_batches += 1


Baseline = CriticBaseline | TrustedBaseline | PoiseBaseline


def baseline_of(algorithm: AlgorithmConfig) -> Baseline:
    """Make the object that compares rewards with a baseline, as the config's algorithm says.

    It learns from each iteration for later ones, so a run keeps one.
    """
    if isinstance(algorithm, PoiseOptions):
        return PoiseBaseline(algorithm.poise)
    if isinstance(algorithm.baseline, Trusted):
        return TrustedBaseline(algorithm.baseline)
    return CriticBaseline(algorithm.baseline)


def response_features(batch: EvaluatedBatch) -> Float[Tensor, "B F"]:
    """Return the features of each response, from which POISE predicts a reward.

    They are the actor's state of the last prompt token, the mean of the response's last states, and
    the mean entropy of its tokens; 0 where a response has none. F is 2 H + 1.
    """
    states, entropy = batch.actor_states, batch.old_entropy
    if states is None or entropy is None:
        raise ValueError("POISE reads the actor's states and entropies, which this batch lacks")
    rows = []
    for row_states in states:
        layer_states = row_states[:, 0].float()  # one layer
        mean = layer_states[1:].mean(dim=0) if len(layer_states) > 1 else layer_states.sum(dim=0)
        rows.append(torch.cat([layer_states[:1].sum(dim=0), mean]))
    means = response_means(entropy, batch.response_mask).float()
    return torch.cat([torch.stack(rows), means[:, None]], dim=1)
