"""`algorithm.baseline.kind: trusted`: values that count as far as earlier rollouts confirm them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.credit import (
    advantages_and_targets,
    policy_lambda,
    received_rewards,
    value_token_mask,
)
from vapo.config import Hyperparameters
from vapo.config.algorithm import Trusted
from vapo.functional.baselines import leave_one_out_advantages, mean_of_others
from vapo.functional.critic_mixtures import mean_of_batch_others
from vapo.functional.masking import last_column, zero_outside
from vapo.functional.trusted_baseline import (
    Evidence,
    Trust,
    batch_evidence,
    earned_trust,
    final_surprise,
    later_evidence,
    no_evidence,
    trusted_lambda,
    trusted_values,
)
from vapo.system.distributed import sum_over_ranks
from vapo.types import EvaluatedBatch


class TrustedEstimate(NamedTuple):
    """What `TrustedBaseline.estimate` returns for a batch: advantages, which are not whitened, and
    the values and lambdas of which they were made."""

    advantages: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"]
    lambdas: Float[Tensor, " B"]


class TrustedBaseline:
    """Makes advantages in which the critic's values count as far as earlier rollouts confirm them.

    A run has one, with the evidence of its earlier rollouts.
    `trust` comes from earlier rollout batches, so that no response influences its own baseline. In
    the first batch the critic has no weight. The batches of value pretraining count as earlier
    ones. A checkpoint has the evidence, so that a resumed run continues with it.
    """

    def __init__(self, config: Trusted) -> None:
        self.config = config
        self.evidence = no_evidence()
        self.metrics: dict[str, float] = {}

    @property
    def trust(self) -> Trust:
        """The trust with which the next batch's advantages will be made."""
        return earned_trust(self.evidence)

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor.tolist() for name, tensor in self.evidence._asdict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evidence = Evidence(
            *(torch.tensor(state[name], dtype=torch.double) for name in Evidence._fields)
        )

    def learn(
        self,
        batch: EvaluatedBatch,
        value_rewards: Float[Tensor, "B T"],
        hyperparameters: Hyperparameters,
    ) -> None:
        """Add to the evidence how well a batch's values predict its rewards. All ranks call this.

        A batch with numbers that are not finite adds nothing.

        Args:
            value_rewards: the rewards that the critic learns to predict.
        """
        rewards, received = value_rewards.sum(dim=1), received_rewards(batch, value_rewards)
        others_mean = _others_mean(batch, rewards)
        evidence = batch_evidence(
            *(batch.values, rewards, others_mean, received),
            batch.counted_mask & value_token_mask(batch, hyperparameters),
            trusted=trusted_values(
                batch.values, others_mean, received, batch.response_mask, trust=self.trust
            ),
            group_size=batch.group_size,
            reduce=sum_over_ranks,
        )
        if bool(evidence.sums.isfinite().all() & evidence.products.isfinite().all()):
            updated = later_evidence(self.evidence, evidence, decay=self.config.decay)
            self.evidence = Evidence(updated.sums.cpu(), updated.products.cpu())

    def estimate(
        self,
        batch: EvaluatedBatch,
        token_rewards: Float[Tensor, "B T"],
        value_rewards: Float[Tensor, "B T"],
        hyperparameters: Hyperparameters,
    ) -> TrustedEstimate:
        """Compute advantages by the trust from earlier batches, then learn from this batch.

        Without trust every token has its response's leave-one-out advantage, bit for bit. With full
        trust the advantages are VAPO's. Every rank must call this.

        Args:
            token_rewards: the policy's rewards.
            value_rewards: the critic's rewards, which may lack the punishment of overlong
                responses.
        """
        trust, rewards = self.trust, token_rewards.sum(dim=1)
        others_mean, mask = _others_mean(batch, rewards), batch.response_mask
        received = received_rewards(batch, token_rewards)
        values = trusted_values(batch.values, others_mean, received, mask, trust=trust)
        lambda_ = trusted_lambda(policy_lambda(batch, hyperparameters), trust=trust)
        if trust.is_none:
            advantages = self._without_critic(batch, rewards, others_mean)
        else:
            places = mask & value_token_mask(batch, hyperparameters)
            surprise = final_surprise(values, rewards, received, places)[:, None]
            surprise = (1 - trust.end) * surprise
            reduced_rewards = token_rewards.scatter_add(1, last_column(mask)[:, None], -surprise)
            advantages, _ = advantages_and_targets(
                *(batch, reduced_rewards, values, hyperparameters),
                lambda_policy=lambda_,
                lambda_critic=1.0,
            )
            advantages = zero_outside(advantages + surprise, mask)
        self.metrics = {
            "baseline/within_weight": trust.within,
            "baseline/first_value_weight": trust.first,
            "baseline/known_at_end": trust.end,
            "baseline/value_level": trust.first_level + trust.within_level,
        }
        self.learn(batch, value_rewards, hyperparameters)
        lambdas = torch.as_tensor(lambda_, dtype=torch.float64, device=mask.device)
        return TrustedEstimate(advantages, values, lambdas.reshape(-1).expand(len(batch)))

    def _without_critic(
        self, batch: EvaluatedBatch, rewards: Float[Tensor, " B"], others_mean: Float[Tensor, " B"]
    ) -> Float[Tensor, "B T"]:
        """Return as advantage of each token its response's reward less `others_mean`.

        That is the mean reward of other responses, to the same prompt if there are some.
        """
        per_response = rewards - others_mean
        if batch.group_size > 1:  # as the estimator leave_one_out rounds it
            per_response = leave_one_out_advantages(rewards, group_size=batch.group_size)
        return per_response[:, None] * batch.response_mask


def _others_mean(batch: EvaluatedBatch, rewards: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return for each response the mean reward of its prompt's other responses.

    With a group size of 1 it is that of the batch's other responses.
    """
    if batch.group_size > 1:
        return mean_of_others(rewards, group_size=batch.group_size)
    return mean_of_batch_others(rewards, counted=~batch.is_filler, reduce=sum_over_ranks)
