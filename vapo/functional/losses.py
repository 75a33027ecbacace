"""Losses of the actor and the critic, per token, and their reduction to one number.

The surrogates that may stand in the place of PPO's clipped one are in `surrogates.py`.

Every denominator belongs to the optimizer step's whole minibatch. A caller that cuts the
minibatch into micro-batches passes it in (`masking.loss_denominator`, added up over
micro-batches and ranks); the sum of the parts is then the loss of the whole.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.functional.masking import LossReduction, at_least_float32, loss_denominator, zero_outside
from vapo.functional.mismatch import MAX_LOG_RATIO


def clipped_surrogate(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    eps_low: float | int,
    eps_high: float | int,
    dual_clip: float | int | None = None,
) -> Float[Tensor, "B T"]:
    """Return PPO's clipped loss of every token, to be minimised.

        ratio  = exp(logprobs - old_logprobs)
        loss_t = -min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)
        with dual_clip c > 1, where A < 0:  loss_t = min(loss_t, -c * A)

    Source: VAPO 4.3, DAPO 3.1 (Clip-Higher); dual clip: arXiv 1912.09729. Component
    `clip_higher`; off: eps_high = eps_low, plain PPO. Deviation: the log-ratio is held within
    +-20, and has no gradient beyond.
    Padding: there is no mask here. A token with a non-finite input gets loss NaN and no
    gradient; `aggregate` drops it if it is masked out, and shows it if it is not.
    Raises: ValueError when a bound is negative or dual_clip <= 1.
    """
    if eps_low < 0 or eps_high < 0:
        raise ValueError(f"clip bounds must be >= 0, got {eps_low} and {eps_high}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    log_ratio = logprobs - old_logprobs
    is_valid = torch.isfinite(log_ratio) & torch.isfinite(advantages)
    log_ratio = torch.where(is_valid, log_ratio, 0.0)
    advantages = torch.where(is_valid, advantages, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # keeps exp finite
    clipped_ratio = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return torch.where(is_valid, loss, torch.nan)


def aggregate(
    token_losses: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    reduction: LossReduction,
    denominator: float | int | Tensor | None = None,
) -> Float[Tensor, ""]:
    """Reduce token losses to the scalar that is differentiated.

        token_mean:       sum over all tokens of loss_t / number of tokens
        sequence_mean:    sum over responses of (mean of its loss_t) / number of responses
        sequence_sum:     sum over all tokens of loss_t / number of responses
        constant_length:  sum over all tokens of loss_t / (responses * max_response_tokens)

    Source: VAPO 4.2, DAPO 3.3. Component `token_level_loss`; off: sequence_mean, where a token
    of a response of l tokens weighs 1/l. sequence_sum: the response is one action, whose
    log-prob is the sum over its tokens (RLOO, ReMax). constant_length: Dr.GRPO.
    Units: `denominator` is the minibatch's `loss_denominator`, added up, when this is one
    micro-batch of it; by default this batch's own (constant_length has no default).
    Padding: ignored in value and gradient. A response without a token adds 0 and, by default,
    is not counted; nothing to count at all gives 0.
    Raises: ValueError on an unknown reduction.
    """
    losses = zero_outside(token_losses, response_mask)
    if reduction in ("token_mean", "sequence_sum", "constant_length"):
        total = losses.sum()
    elif reduction == "sequence_mean":
        total = (losses.sum(dim=1) / response_mask.sum(dim=1).clamp(min=1)).sum()
    else:
        raise ValueError(f"unknown reduction {reduction!r}")
    if denominator is None:
        denominator = loss_denominator(response_mask, reduction=reduction)
    return _divide(total, denominator)


def value_loss(
    values: Float[Tensor, "B T"],
    value_targets: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    denominator: float | int | Tensor | None = None,
    old_values: Float[Tensor, "B T"] | None = None,
    value_clip: float | int | None = None,
    token_weights: Float[Tensor, " B #T"] | None = None,
) -> Float[Tensor, ""]:
    """Return the critic's squared error, averaged over tokens.

        loss = 1/2 * sum_t (V(s_t) - R_t)^2 / number of tokens
        with value_clip c:  V_clip = V_old + clip(V - V_old, -c, c)
                            loss_t = 1/2 * max((V - R)^2, (V_clip - R)^2)
        with token_weights w:   loss_t = w_t * loss_t, over the same number of tokens

    Source: VC-PPO algorithm 1 (the 1/2 is theirs; no value clip there, nor by default here);
    weights: EasyPPO (arXiv 2609.36802), one a response, `baselines.prompt_noise_weights`; or the
    returns in a target (`measured_targets`), which `denominator` then counts in place of tokens.
    Units: reward squared; `denominator` is the minibatch's number of tokens.
    Padding: ignored in value and gradient.
    Raises: ValueError when value_clip is given without old_values, or is not above 0.
    """
    values = zero_outside(values, response_mask)
    value_targets = zero_outside(value_targets, response_mask)
    squared_error = (values - value_targets).square()
    if value_clip is not None:
        if old_values is None or value_clip <= 0:
            raise ValueError("value_clip needs old_values and must be above 0")
        old_values = zero_outside(old_values, response_mask)
        clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
        squared_error = torch.maximum(squared_error, (clipped - value_targets).square())
    losses = 0.5 * squared_error
    if token_weights is not None:
        losses = losses * token_weights.detach()
    return aggregate(losses, response_mask, reduction="token_mean", denominator=denominator)


def categorical_value_loss(
    logits: Float[Tensor, "B T K"],
    targets: Float[Tensor, "B T K"],
    response_mask: Bool[Tensor, "B T"],
    *,
    denominator: float | int | Tensor | None = None,
    token_weights: Float[Tensor, " B #T"] | None = None,
) -> Float[Tensor, ""]:
    """Return the cross-entropy of a critic with K bins, averaged over tokens, in float32.

        loss = -(sum over tokens of sum_k p_k * log softmax(z)_k) / number of tokens

    Source: HL-Gauss critics (arXiv 2608.02181), Le Critique (2608.16739: two bins). p are the
    targets of `value_heads`, and have no gradient. There is no value clip.
    Units: nats; `denominator` is the minibatch's number of tokens. `token_weights`, for each token
    or response, multiply the losses in the sum.
    Padding: ignored in value and gradient.
    """
    z = torch.where(response_mask[..., None], at_least_float32(logits), 0.0)
    losses = -(targets.detach() * z.log_softmax(dim=-1)).sum(dim=-1)
    if token_weights is not None:
        losses = losses * token_weights.detach()
    return aggregate(losses, response_mask, reduction="token_mean", denominator=denominator)


def positive_example_lm_loss(
    logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    is_correct: Bool[Tensor, " B"],
    *,
    denominator: float | int | Tensor | None = None,
) -> Float[Tensor, ""]:
    """Return the negative log-likelihood of the correct responses, per token of theirs.

        loss = -(sum over tokens of correct responses of log pi) / (number of those tokens)

    Source: VAPO 4.3, equation of L_NLL. Component `positive_example_lm_loss`; off: mu = 0 in
    L = L_PPO + mu * L_NLL. Correct is the verifier's verdict, not a positive reward.
    Units: nats per token; `denominator` is the number of tokens of the minibatch's *correct*
    responses.
    Padding: ignored in value and gradient. No correct response: 0, with gradient 0.
    """
    is_positive = response_mask & is_correct[:, None]
    return aggregate(-logprobs, is_positive, reduction="token_mean", denominator=denominator)


def kl_penalty(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    *,
    estimator: Literal["k1", "k2", "k3"],
) -> Float[Tensor, "B T"]:
    """Return an estimate of KL(pi || ref) from each token, which was sampled from pi.

        d = logprobs - ref_logprobs
        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

    As a loss, the expected gradient is 0 for k1 (the reference drops out), that of
    KL(pi || ref) for k2 and of KL(ref || pi) for k3; k1 is for rewards.
    Source: Schulman, "Approximating KL divergence"; k3 is GRPO's. VAPO uses none (default
    coefficient 0). Deviation: in k3 the exponent is held within +-20.
    Units: nats.
    Padding: there is no mask here. A token with a non-finite input gets NaN and no gradient.
    Raises: ValueError on an unknown estimator.
    """
    difference = logprobs - ref_logprobs
    is_valid = torch.isfinite(difference)
    difference = torch.where(is_valid, difference, 0.0)
    if estimator == "k1":
        kl = difference
    elif estimator == "k2":
        kl = 0.5 * difference.square()
    elif estimator == "k3":
        kl = torch.expm1(-difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + difference
    else:
        raise ValueError(f"estimator must be k1, k2 or k3, got {estimator!r}")
    return torch.where(is_valid, kl, torch.nan)


def _divide(total: Tensor, denominator: float | int | Tensor) -> Tensor:
    """Return total / denominator; where the denominator is 0, the total, which is then 0, too."""
    count = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    return total / torch.where(count > 0, count, 1.0)
