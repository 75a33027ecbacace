"""The losses of one micro-batch, and the statistics that are logged with them.

Every number added to `Totals` is this micro-batch's share of the minibatch's value, so the sum
over micro-batches and ranks is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.config import FitConfig, Hyperparameters
from vapo.config.algorithm import DisSurrogate, DppoSurrogate
from vapo.config.critic import CategoricalHead, CriticConfig
from vapo.config.schema import AlgorithmConfig
from vapo.functional.losses import (
    aggregate,
    categorical_value_loss,
    clipped_surrogate,
    dis_surrogate,
    dppo_surrogate,
    kl_penalty,
    logprob_surrogate,
    positive_example_lm_loss,
    value_loss,
)
from vapo.functional.metrics import approx_kl, clip_fractions
from vapo.functional.mismatch import probability_near, ratio_in_band
from vapo.functional.value_heads import hl_gauss_targets, two_hot_targets
from vapo.networks.value_head import head_of
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.training.minibatches import Minibatch
from vapo.types import TrainingBatch


class Totals:
    """Metrics of one minibatch, collected over micro-batches."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, key: str, share: Tensor) -> None:
        share = share.detach().double()
        self.sums[key] = self.sums[key] + share if key in self.sums else share

    def maximum(self, key: str, value: Tensor) -> None:
        value = value.detach().double()
        self.maxima[key] = torch.maximum(self.maxima[key], value) if key in self.maxima else value

    def reduce(self) -> dict[str, float]:
        """The minibatch's metrics, reduced over all ranks."""
        reduced: dict[str, float] = {}
        for values, over_ranks in ((self.sums, sum_over_ranks), (self.maxima, max_over_ranks)):
            if values:
                stacked = over_ranks(torch.stack(list(values.values())))
                reduced |= dict(zip(values, stacked.tolist(), strict=True))
        return reduced


def has_loss(
    network: str,
    minibatch: Minibatch,
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
) -> bool:
    """Whether `actor` or `critic` has a loss in the minibatch; the same answer on all ranks.

    The critic has none where every token is masked out. The actor has none where each term is 0 by
    construction: every token is masked out or has an advantage of exactly 0 (the rewards of
    each group are equal), none is of a correct response if mu > 0, and there is neither a KL term
    nor an entropy bonus. A minibatch with a `fault` counts as one with loss.
    """
    if minibatch.fault is not None:
        return True
    if network == "critic":
        return minibatch.num_value_tokens > 0
    has_kl = algorithm.kl.coef > 0 and algorithm.kl.placement == "loss"
    return (
        minibatch.num_advantage_tokens > 0
        or (hyperparameters.mu > 0 and minibatch.num_positive_tokens > 0)
        or (algorithm.entropy_coef > 0 and minibatch.num_entropy_tokens > 0)
        or (has_kl and minibatch.num_tokens > 0)
    )


def policy_objective(
    logprobs: Float[Tensor, "b T"],
    entropy: Float[Tensor, "b T"],
    rows: TrainingBatch,
    minibatch: Minibatch,
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
    totals: Totals,
) -> Float[Tensor, ""]:
    """These rows' share of L = L_PPO + mu * L_NLL (+ KL - entropy bonus).

    Importance weights and the policy mask (`vapo.advantages.mismatch_correction`) are for L_PPO
    alone.
    """
    hp, mask = hyperparameters, rows.loss_mask
    advantages = rows.advantages
    assert advantages is not None, "the phase trains the policy"
    before = before_update(logprobs, rows, hp, algorithm)
    token_losses = surrogate_losses(
        logprobs, before, rows.rollout_logprobs, advantages, hp, algorithm
    )
    loss = policy_loss = aggregate(
        rows.importance_weights * token_losses,
        rows.policy_mask,
        reduction=hp.loss_reduction,
        denominator=minibatch.denominator(hp.loss_reduction, of_policy=True),
    )
    totals.add("actor/policy_loss", policy_loss)
    if hp.mu > 0:
        lm_loss = positive_example_lm_loss(
            logprobs, mask, rows.is_correct, denominator=minibatch.num_positive_tokens
        )
        loss = loss + hp.mu * lm_loss
        totals.add("actor/positive_example_lm_loss", lm_loss)
    if rows.ref_logprobs is not None and algorithm.kl.placement == "loss":
        kl = aggregate(
            kl_penalty(logprobs, rows.ref_logprobs, estimator=algorithm.kl.estimator),
            mask,
            reduction=hp.loss_reduction,
            denominator=minibatch.denominator(hp.loss_reduction),
        )
        loss = loss + algorithm.kl.coef * kl
        totals.add("actor/kl_loss", kl)
    mean_entropy = aggregate(
        entropy, mask, reduction="token_mean", denominator=minibatch.num_tokens
    )
    totals.add("actor/entropy", mean_entropy)
    if algorithm.entropy_coef > 0:
        bonus = aggregate(
            entropy,
            rows.entropy_mask,
            reduction="token_mean",
            denominator=minibatch.num_entropy_tokens,
        )
        loss = loss - algorithm.entropy_coef * bonus
    compared = (logprobs.detach(), before, advantages)
    add_ratio_statistics(*compared, rows, minibatch.num_tokens, hp, algorithm, totals)
    return loss


def before_update(
    logprobs: Float[Tensor, "b T"],
    rows: TrainingBatch,
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
) -> Float[Tensor, "b T"]:
    """The log-probs to which the update's are compared: the old policy's, where they are read.

    Else those of the policy that the surrogate divides by: with the clipped ratio this is a single
    step, before which the policy is the one that the step differentiates; else the rollouts'.
    """
    if hyperparameters.reads_old_logprobs:
        assert rows.old_logprobs is not None, "the phase trains the policy"
        return rows.old_logprobs
    if algorithm.surrogate == "clipped_ratio":
        return logprobs.detach()
    return rows.rollout_logprobs


def surrogate_losses(
    logprobs: Float[Tensor, "b T"],
    before: Float[Tensor, "b T"],
    rollout_logprobs: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
) -> Float[Tensor, "b T"]:
    """L_PPO of each token, as `algorithm.surrogate` defines it."""
    of_rollouts = (logprobs, rollout_logprobs, advantages)
    if isinstance(algorithm, DisSurrogate):
        low, high = algorithm.dis_eps_low, algorithm.dis_eps_high
        return dis_surrogate(*of_rollouts, eps_low=low, eps_high=high)
    if isinstance(algorithm, DppoSurrogate):
        return dppo_surrogate(*of_rollouts, delta=algorithm.dppo_delta)
    if algorithm.surrogate == "logprob":
        return logprob_surrogate(logprobs, advantages)
    bounds = {"eps_low": hyperparameters.eps_low, "eps_high": hyperparameters.eps_high}
    dual_clip = algorithm.dual_clip
    return clipped_surrogate(logprobs, before, advantages, **bounds, dual_clip=dual_clip)


def add_ratio_statistics(
    logprobs: Float[Tensor, "b T"],
    before: Float[Tensor, "b T"],
    advantages: Float[Tensor, "b T"],
    rows: TrainingBatch,
    num_tokens: int,
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
    totals: Totals,
) -> None:
    """Approximate KL to the policy before the update, the largest ratio, and the share of tokens
    that are clipped, or that DIS or DPPO reject for their ratio to the rollout policy."""
    mask, num_tokens = rows.loss_mask, max(num_tokens, 1)
    share = mask.sum() / num_tokens
    kl = approx_kl(logprobs, before, mask)
    totals.add("actor/approx_kl", torch.where(share > 0, kl * share, 0.0))
    ratio = torch.where(mask, (logprobs - before).exp(), 0.0)
    totals.maximum("actor/ratio_max", ratio.max())
    if algorithm.surrogate == "clipped_ratio":
        bounds = {"eps_low": hyperparameters.eps_low, "eps_high": hyperparameters.eps_high}
        low, high = clip_fractions(logprobs, before, advantages, mask, **bounds)
        totals.add("actor/clip_fraction_low", low / num_tokens)
        totals.add("actor/clip_fraction_high", high / num_tokens)
        return
    if isinstance(algorithm, DisSurrogate):
        bounds = {"eps_low": algorithm.dis_eps_low, "eps_high": algorithm.dis_eps_high}
        kept = ratio_in_band(logprobs, rows.rollout_logprobs, **bounds)
    elif isinstance(algorithm, DppoSurrogate):
        delta = algorithm.dppo_delta
        kept = probability_near(logprobs, rows.rollout_logprobs, advantages, delta=delta)
    else:
        return
    totals.add("actor/rejected_share", (mask & ~kept).sum() / num_tokens)


def value_objective(
    output: Mapping[str, Tensor],
    rows: TrainingBatch,
    minibatch: Minibatch,
    config: FitConfig,
    totals: Totals,
) -> Float[Tensor, ""]:
    """These rows' share of the value loss by `critic.loss`, a mean over the tokens that carry it,
    or over the returns of which their targets are means.

    With cross-entropy the squared error of the expectation is logged beside it, to compare heads.
    Of several critics each has its own rows, and the denominator counts the tokens of all.

    Args:
        output: `values` [b, T], and of a categorical head `logits` [b, T, K].
    """
    targets, old_values = rows.value_targets, rows.old_member_values
    assert targets is not None, "the estimator trains a critic"
    loss = squared_error = value_loss(
        output["values"],
        targets,
        rows.value_mask,
        denominator=minibatch.num_value_draws,
        old_values=rows.old_values if old_values is None else old_values,
        value_clip=config.critic.value_clip,
        token_weights=rows.value_weights[:, None] * rows.value_draws,
    )
    if config.critic.loss == "cross_entropy":
        totals.add("critic/squared_error", squared_error)
        loss = categorical_value_loss(
            output["logits"],
            distributions(targets, config.critic),
            rows.value_mask,
            denominator=minibatch.num_value_draws,
            token_weights=rows.value_draws,  # a rule: no weights of responses
        )
    totals.add("critic/value_loss", loss)
    return loss


def distributions(
    value_targets: Float[Tensor, "b T"], critic: CriticConfig
) -> Float[Tensor, "b T K"]:
    """Value targets as distributions over the bins of the categorical head."""
    head, bins = critic.head, head_of(critic)
    assert isinstance(head, CategoricalHead), "a rule: cross-entropy needs a categorical head"
    if head.targets == "two_hot":
        return two_hot_targets(value_targets, bins.centers)
    return hl_gauss_targets(value_targets, **bins.options, sigma_ratio=head.sigma_ratio)
