"""The losses of one micro-batch, and the statistics that are logged with them.

Every number added to `Totals` is this micro-batch's share of the minibatch's value, so the sum
over micro-batches and ranks is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.advantages.value_loss_columns import predicted_targets
from vapo.config import FitConfig, Hyperparameters
from vapo.config.schema import AlgorithmConfig
from vapo.config.surrogates import CispoSurrogate, DisSurrogate, DppoSurrogate, GspoSurrogate
from vapo.functional.losses import (
    aggregate,
    categorical_value_loss,
    clipped_surrogate,
    kl_penalty,
    positive_example_lm_loss,
    value_loss,
)
from vapo.functional.masking import LossReduction, zero_outside
from vapo.functional.metrics import approx_kl, clipped_tokens
from vapo.functional.mismatch import mean_log_ratio, probability_near, ratio_in_band
from vapo.functional.surrogates import (
    cispo_surrogate,
    dis_surrogate,
    dppo_surrogate,
    gspo_surrogate,
    logprob_surrogate,
)
from vapo.networks.value_head import distributions
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.training.minibatches import Minibatch
from vapo.types import TrainingBatch


class Totals:
    """Collects the metrics of one minibatch, as sums or maxima over its micro-batches."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, key: str, share: Tensor) -> None:
        """Add a micro-batch's share to a metric that is the sum of all shares."""
        share = share.detach().double()
        self.sums[key] = self.sums[key] + share if key in self.sums else share

    def maximum(self, key: str, value: Tensor) -> None:
        """Raise a metric to a micro-batch's value if that is larger."""
        value = value.detach().double()
        self.maxima[key] = torch.maximum(self.maxima[key], value) if key in self.maxima else value

    def reduce(self) -> dict[str, float]:
        """Return the minibatch's metrics over all ranks. Every rank must call this."""
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
    """Whether the loss of `actor` or `critic` has a token in the minibatch, on any rank.

    The critic has no loss if every token is masked out. The actor has none if all its terms are 0
    by construction: each token is masked out or has an advantage of exactly 0 (as where the rewards
    of each group are equal), there is no correct response for the LM loss, and no KL term or
    entropy bonus. If the minibatch has a `fault`, the answer is True.
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
    """Return a micro-batch's share of the actor's loss, L_PPO + mu * L_NLL (+ KL - entropy bonus).

    The loss' terms and statistics are added to `totals`. Importance weights and the policy mask
    (`vapo.advantages.mismatch_correction`) are applied to L_PPO alone.
    """
    hp, mask = hyperparameters, rows.loss_mask
    advantages = rows.advantages
    assert advantages is not None, "the phase trains the policy"
    reference_logprobs = before_update(logprobs, rows, hp, algorithm)
    token_losses = surrogate_losses(logprobs, reference_logprobs, rows, hp, algorithm)
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
    add_ratio_statistics(
        logprobs.detach(), reference_logprobs, rows, minibatch, hp, algorithm, totals
    )
    return loss


def before_update(
    logprobs: Float[Tensor, "b T"],
    rows: TrainingBatch,
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
) -> Float[Tensor, "b T"]:
    """Return the log-probs of the policy before the update, to which `logprobs` are compared.

    If `old_logprobs` were computed, these are returned. If not, and the surrogate divides by the
    old policy, the iteration has a single optimizer step, so `logprobs` are the old policy's and
    are returned without gradient. If the surrogate divides by another policy, or by none, the
    engine's `rollout_logprobs` are returned.
    """
    if hyperparameters.reads_old_logprobs:
        assert rows.old_logprobs is not None, "the phase trains the policy"
        return rows.old_logprobs
    if algorithm.ratio_to == "old_policy":
        return logprobs.detach()
    return rows.rollout_logprobs


def surrogate_losses(
    logprobs: Float[Tensor, "b T"],
    reference_logprobs: Float[Tensor, "b T"],
    rows: TrainingBatch,
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
) -> Float[Tensor, "b T"]:
    """Return the policy loss of each token, as `algorithm.surrogate` defines it.

    The ratio of a whole response (GSPO) is computed from all its sampled tokens, those without loss
    included. A row always has all tokens of its response.
    """
    advantages = rows.advantages
    assert advantages is not None, "the phase trains the policy"
    against_old = logprobs, reference_logprobs, advantages
    against_rollouts = logprobs, rows.rollout_logprobs, advantages
    low, high = clip_bounds(hyperparameters, algorithm)
    if isinstance(algorithm, GspoSurrogate):
        return gspo_surrogate(*against_old, rows.response_mask, eps_low=low, eps_high=high)
    if isinstance(algorithm, CispoSurrogate):
        eps_low, eps_high = algorithm.cispo_eps_low, algorithm.cispo_eps_high
        return cispo_surrogate(*against_old, eps_low=eps_low, eps_high=eps_high)
    if isinstance(algorithm, DisSurrogate):
        low, high = algorithm.dis_eps_low, algorithm.dis_eps_high
        return dis_surrogate(*against_rollouts, eps_low=low, eps_high=high)
    if isinstance(algorithm, DppoSurrogate):
        return dppo_surrogate(*against_rollouts, delta=algorithm.dppo_delta)
    if algorithm.surrogate == "logprob":
        return logprob_surrogate(logprobs, advantages)
    dual_clip = algorithm.dual_clip
    return clipped_surrogate(*against_old, eps_low=low, eps_high=high, dual_clip=dual_clip)


def clip_bounds(
    hyperparameters: Hyperparameters, algorithm: AlgorithmConfig
) -> tuple[float, float]:
    """Return the lower and the upper bound of PPO's clip, or of GSPO's."""
    if isinstance(algorithm, GspoSurrogate):
        return algorithm.gspo_eps_low, algorithm.gspo_eps_high
    return hyperparameters.eps_low, hyperparameters.eps_high


def add_ratio_statistics(
    logprobs: Float[Tensor, "b T"],
    reference_logprobs: Float[Tensor, "b T"],
    rows: TrainingBatch,
    minibatch: Minibatch,
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
    totals: Totals,
) -> None:
    """Add to `totals` the KL to the policy before the update, and statistics of the token ratios.

    These are the largest ratio, and the shares of tokens that the surrogate cuts. The shares are of
    all tokens with loss. With GSPO they are the means over responses of each response's share.
    """
    mask = rows.loss_mask
    share = mask.sum() / max(minibatch.num_tokens, 1)
    kl = approx_kl(logprobs, reference_logprobs, mask)
    totals.add("actor/approx_kl", torch.where(share > 0, kl * share, 0.0))
    ratio = torch.where(mask, (logprobs - reference_logprobs).exp(), 0.0)
    totals.maximum("actor/ratio_max", ratio.max())
    is_gspo = isinstance(algorithm, GspoSurrogate)
    reduction: LossReduction = "sequence_mean" if is_gspo else "token_mean"
    denominator = minibatch.denominator(reduction)
    cut = cut_tokens(logprobs, reference_logprobs, rows, hyperparameters, algorithm)
    for name, is_cut in cut.items():
        counts = is_cut.double()
        share = aggregate(counts, mask, reduction=reduction, denominator=denominator)
        totals.add(f"actor/{name}", share)


def cut_tokens(
    logprobs: Float[Tensor, "b T"],
    reference_logprobs: Float[Tensor, "b T"],
    rows: TrainingBatch,
    hyperparameters: Hyperparameters,
    algorithm: AlgorithmConfig,
) -> dict[str, Bool[Tensor, "b T"]]:
    """Return masks of the tokens whose gradient the surrogate cuts off or bounds, by metric name.

    DIS and DPPO reject a token for its ratio to the rollout policy. A clip cuts a token's gradient
    off for its ratio, or for its response's ratio (GSPO). CISPO bounds a token's weight.
    """
    advantages, mu = rows.advantages, rows.rollout_logprobs
    assert advantages is not None, "the phase trains the policy"
    if isinstance(algorithm, DisSurrogate):
        low, high = algorithm.dis_eps_low, algorithm.dis_eps_high
        return {"rejected_share": ~ratio_in_band(logprobs, mu, eps_low=low, eps_high=high)}
    if isinstance(algorithm, DppoSurrogate):
        delta = algorithm.dppo_delta
        return {"rejected_share": ~probability_near(logprobs, mu, advantages, delta=delta)}
    if algorithm.ratio_to is None:
        return {}
    log_ratio, sampled = logprobs - reference_logprobs, rows.response_mask
    if isinstance(algorithm, GspoSurrogate):
        of_responses = mean_log_ratio(zero_outside(log_ratio, sampled), sampled)
        log_ratio = of_responses[:, None].expand_as(log_ratio)
    ratio = log_ratio.exp()
    low, high = clip_bounds(hyperparameters, algorithm)
    cut = clipped_tokens(ratio, advantages, eps_low=low, eps_high=high)
    if isinstance(algorithm, CispoSurrogate):
        eps_low = 0.0 if algorithm.cispo_eps_low is None else 1.0 - algorithm.cispo_eps_low
        cut = ratio < eps_low, ratio > 1.0 + algorithm.cispo_eps_high
    return dict(zip(("clip_fraction_low", "clip_fraction_high"), cut, strict=True))


def value_objective(
    output: Mapping[str, Tensor],
    rows: TrainingBatch,
    minibatch: Minibatch,
    config: FitConfig,
    totals: Totals,
) -> Float[Tensor, ""]:
    """Return the micro-batch's share of the critic's loss, which `critic.loss` chooses.

    The loss is a mean over the tokens with value loss. A token whose target is a mean of several
    returns counts once for each of them. With cross-entropy the squared error is logged beside it,
    so that heads can be compared. With several critics all rows belong to one of them, and the
    denominator counts the tokens of all.

    Args:
        output: the critic's `values` [b, T], and `logits` [b, T, K] if its head is categorical.
    """
    targets, old_values = rows.value_targets, rows.old_member_values
    assert targets is not None, "the estimator trains a critic"
    values, offsets = output["values"], rows.value_offsets
    loss = squared_error = value_loss(
        values if offsets is None else values + offsets,
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
            distributions(predicted_targets(rows), config.critic),
            rows.value_mask,
            denominator=minibatch.num_value_draws,
            token_weights=rows.value_draws,  # a rule: no weights of responses
        )
    totals.add("critic/value_loss", loss)
    return loss
