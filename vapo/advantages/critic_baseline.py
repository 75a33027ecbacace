"""`algorithm.baseline`: mix the critic's advantages with those against a mean reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from vapo.config.algorithm import BaselineConfig, Evpo, LinearMix, Tether
from vapo.functional.advantages import monte_carlo_returns
from vapo.functional.baselines import (
    group_mean_advantages,
    leave_one_out_advantages,
    mean_of_others,
)
from vapo.functional.critic_mixtures import (
    batch_mean_advantages,
    gate_explained_variance,
    lagged_rho,
    linear_mix,
    tether_advantages,
    tether_fit,
)
from vapo.functional.masking import first_column, response_means, zero_outside
from vapo.system.distributed import sum_over_ranks
from vapo.types import EvaluatedBatch


class CriticBaseline:
    """Mixes the critic's advantages with those against a mean reward, as `algorithm.baseline` says.

    A run has one. `rho` is the critic's weight in TETHER, fitted on earlier policy iterations.
    `num_batches` counts those iterations, `num_fits` those with a fit, and `num_critic` those in
    which EVPO used the critic. `metrics` describe the latest batch's advantages. A checkpoint has
    the state, so that a resumed run continues with it.
    """

    def __init__(self, config: BaselineConfig) -> None:
        self.config = config
        self.rho = 0.0
        self.num_batches = 0
        self.num_fits = 0
        self.num_critic = 0
        self.metrics: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        names = ("rho", "num_batches", "num_fits", "num_critic")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def weigh(
        self,
        advantages: Float[Tensor, "B T"],
        batch: EvaluatedBatch,
        token_rewards: Float[Tensor, "B T"],
        value_rewards: Float[Tensor, "B T"],
        *,
        gamma: float,
    ) -> Float[Tensor, "B T"]:
        """Return the advantages to train the policy on, unwhitened. Every rank must call this.

        They are the critic's, those against a mean reward, or a mixture, by the config.

        Args:
            advantages: the critic's advantages (GAE).
            token_rewards: the policy's rewards. Their sum is compared with other responses' sums.
            value_rewards: the rewards that the critic learns to predict. EVPO measures with their
                returns how good the values are.
            gamma: the discount of those returns.
        """
        config, mask = self.config, batch.response_mask
        rewards = token_rewards.sum(dim=1)
        self.metrics = {}
        if isinstance(config, LinearMix):
            is_mean = config.group_baseline == "mean"
            score = group_mean_advantages if is_mean else leave_one_out_advantages
            group_advantages = score(rewards, group_size=batch.group_size)[:, None]
            advantages = linear_mix(advantages, group_advantages, mask, rho=config.weight)
            self.metrics["baseline/critic_weight"] = config.weight
        elif isinstance(config, Tether):
            advantages = self._tether(advantages, batch, rewards, config)
        elif isinstance(config, Evpo):
            returns = monte_carlo_returns(value_rewards, mask, gamma=gamma)
            advantages = self._gate(advantages, batch, rewards, returns, config)
        self.num_batches += 1
        return advantages

    def _tether(
        self,
        advantages: Float[Tensor, "B T"],
        batch: EvaluatedBatch,
        rewards: Float[Tensor, " B"],
        config: Tether,
    ) -> Float[Tensor, "B T"]:
        """Return TETHER's advantages: the critic's, mixed with those against a mean reward.

        It is the mean reward of the prompt's other responses. The critic's weight `rho` comes from
        earlier rollouts. Then this batch updates it for later ones.
        """
        others_mean = mean_of_others(rewards, group_size=batch.group_size)
        columns = (batch.values, others_mean[:, None], advantages)
        earlier_rho, mixed = (
            self.rho,
            tether_advantages(*columns, batch.response_mask, rho=self.rho),
        )
        fitted_rho = tether_fit(
            *columns, batch.loss_mask, ridge=config.ridge, reduce=sum_over_ranks
        )
        self.rho = lagged_rho(self.rho, float(fitted_rho), decay=config.decay)
        self.num_fits += math.isfinite(float(fitted_rho))
        self.metrics = {
            "baseline/critic_weight": earlier_rho,
            "baseline/fitted_weight": float(fitted_rho),
            "baseline/num_fits": float(self.num_fits),
        }
        return mixed

    def _gate(
        self,
        advantages: Float[Tensor, "B T"],
        batch: EvaluatedBatch,
        rewards: Float[Tensor, " B"],
        returns: Float[Tensor, "B T"],
        config: Evpo,
    ) -> Float[Tensor, "B T"]:
        """Return EVPO's advantages: the critic's, if its values explain enough of the returns.

        Otherwise they are those against the mean reward of the batch, or of the group.
        """
        values, mask = batch.values, batch.counted_mask
        predictions, outcomes = values[mask], returns[mask]
        if config.level == "response":
            has_tokens = mask.any(dim=1)
            predictions = response_means(values, mask)[has_tokens]
            first = first_column(mask)[:, None]
            outcomes = returns.gather(1, first)[:, 0][has_tokens]
        explained_share = gate_explained_variance(predictions, outcomes, reduce=sum_over_ranks)
        # all sums over ranks come before the choice, which could differ on a rank with a nan
        from_batch = batch_mean_advantages(rewards, counted=~batch.is_filler, reduce=sum_over_ranks)
        uses_critic = float(explained_share) > config.threshold
        self.num_critic += uses_critic
        self.metrics = {
            "baseline/critic_weight": float(uses_critic),
            "baseline/explained_variance": float(explained_share),
            "baseline/critic_share": self.num_critic / (self.num_batches + 1),
        }
        if uses_critic:
            return advantages
        if config.fallback == "group_mean":
            from_batch = group_mean_advantages(rewards, group_size=batch.group_size)
        return zero_outside(from_batch[:, None].expand(mask.shape), batch.response_mask)
