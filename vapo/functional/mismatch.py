"""Measure how far the sampling engine's policy is from the trainer's, and correct for it.

    d_t     = old_logprobs_t - rollout_logprobs_t
    ratio_t = exp(d_t)                              pi_old / pi_rollout of one token
    ratio   = exp(sum_t d_t / l)                    of a response of l tokens: geometric mean

Tokens are sampled from pi_rollout. It differs from pi_old by the engine's own rounding and
kernels, by top-p and top-k, and by staleness when rollouts are sampled one update ahead. Every
exponent is held within +-20, so that float32 stays finite. Nothing here is differentiated.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.functional.masking import Reduce, identity, zero_outside

MAX_LOG_RATIO = 20.0  # e^20 ~ 5e8: keeps exp finite in float32; far outside any clip bound
_ROUNDING = 8  # units in the last place by which the exponential of a log-prob may be off
OUTLIER_BOUND = 2.0
"""The metric counts a token as an outlier if its ratio leaves [1/2, 2], whatever is corrected."""


class RatioStatistics(NamedTuple):
    """Statistics of pi_old / pi_rollout, per token or per response; std is the population's."""

    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor


class Mismatch(NamedTuple):
    """The result of `mismatch`: how far the log-probs of sampling engine and trainer differ.

    `mean_abs` and `max_abs` are of the differences in nats; `k3` estimates the KL divergence. A
    token counts in `outlier_share` if the ratio of its two probabilities leaves [1/2, 2].
    """

    mean_abs: Tensor
    max_abs: Tensor
    k3: Tensor
    outlier_share: Tensor
    token_ratio: RatioStatistics
    sequence_ratio: RatioStatistics


@torch.no_grad()
def mismatch(
    rollout_logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    reduce: Reduce = identity,
    reduce_max: Reduce = identity,
) -> Mismatch:
    """Compare the engine's log-probs with the trainer's over all True tokens of all ranks.

        d_t = old_logprobs_t - rollout_logprobs_t,  ratio_t = exp(d_t)
        mean_abs, max_abs:  |d_t|
        k3:                 mean of ratio_t - 1 - d_t, estimates KL(pi_rollout || pi_old) >= 0
        outlier_share:      of tokens whose ratio leaves [1/2, 2]

    Source: the k3 estimator is Schulman's, "Approximating KL divergence". Tokens sampled from
    pi_rollout make the mean of ratio_t 1 in expectation, whatever the two policies are.
    Units: nats, ratios, shares. `reduce_max` takes the maximum over ranks.
    Padding: ignored. NaN without a token; a non-finite log-prob of a token shows in the means.
    """
    gap = zero_outside(old_logprobs - rollout_logprobs, mask).double()
    d, sequence_d = _limited(gap), mean_log_ratio(gap, mask)
    is_row = mask.any(dim=1)
    is_outlier = mask & ~((d.exp() >= 1 / OUTLIER_BOUND) & (d.exp() <= OUTLIER_BOUND))
    sums = [gap.abs().sum(), zero_outside(d.expm1() - d, mask).sum(), is_outlier.sum(), mask.sum()]
    mean_abs, k3, outliers, count = reduce(torch.stack([total.double() for total in sums]))
    return Mismatch(
        mean_abs=mean_abs / count,
        max_abs=_maximum(gap.abs(), mask, reduce_max),
        k3=k3 / count,
        outlier_share=outliers / count,
        token_ratio=_statistics(d.exp(), mask, reduce, reduce_max),
        sequence_ratio=_statistics(sequence_d.exp()[:, None], is_row[:, None], reduce, reduce_max),
    )


@torch.no_grad()
def truncated_importance_weights(
    rollout_logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    cap: float | int,
    level: Literal["token", "sequence"] = "token",
) -> Float[Tensor, "B T"]:
    """Return weights of the tokens' policy losses: pi_old / pi_rollout, at most `cap`.

        d_t = old_logprobs_t - rollout_logprobs_t
        token:     w_t = min(exp(d_t), cap)
        sequence:  w_t = min(exp(sum_s d_s), cap), one number a response

    Source: truncated importance sampling (Ionides 2008); per token between engine and trainer
    as in verl, TRL, NeMo-RL (TIS). With cap = inf the sequence level makes the expected gradient
    the on-policy one exactly; the token level does so for one-token responses, and for longer
    ones ignores the probability of the rest of the response, at far less variance.
    Padding: 1 where the mask is False. A non-finite log-prob of a token gives weight NaN.
    Raises: ValueError when cap is not above 0, or on an unknown level.
    """
    if cap <= 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    log_ratio = zero_outside(old_logprobs - rollout_logprobs, mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    elif level != "token":
        raise ValueError(f"level must be token or sequence, got {level!r}")
    return torch.where(mask, _limited(log_ratio).exp().clamp(max=cap), 1.0)


@torch.no_grad()
def icepop_weights(
    rollout_logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    low: float | int,
    high: float | int,
) -> Float[Tensor, "B T"]:
    """Return weights of the tokens' policy losses: pi_old / pi_rollout, or 0 outside a range.

        d_t = old_logprobs_t - rollout_logprobs_t
        w_t = exp(d_t) if low <= exp(d_t) <= high, else 0

    Source: IcePop (the Ling team's report on Ring-1T, arXiv 2510.18855; there 0.5 and 5). A token
    that is dropped is still counted in the denominator, as there. A ratio within rounding of a
    bound is on it, and keeps its loss.
    Padding: 1 where the mask is False. A non-finite log-prob of a token gives weight NaN.
    Raises: ValueError unless 0 < low <= 1 <= high, as a ratio of 1 is not a mismatch.
    """
    if not 0 < low <= 1 <= high:
        raise ValueError(f"the band must have 1 in it, got {low} to {high}")
    ratio = _limited(zero_outside(old_logprobs - rollout_logprobs, mask)).exp()
    rounding = _ROUNDING * torch.finfo(ratio.dtype).eps
    is_out = (ratio < low * (1.0 - rounding)) | (ratio > high * (1.0 + rounding))
    return torch.where(mask, torch.where(is_out, 0.0, ratio), 1.0)


@torch.no_grad()
def responses_in_range(
    rollout_logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    low: float | int | None = None,
    high: float | int | None = None,
) -> Bool[Tensor, " B"]:
    """Mark the responses that keep their policy loss: low <= geometric-mean ratio <= high.

        ratio = exp(sum_t (old_logprobs_t - rollout_logprobs_t) / l) for a response of l tokens

    Source: sequence masking (MIS) of verl and TRL, here on the geometric mean: the product of
    token ratios, and their extremes, leave any range more often the longer the response is,
    so bounds on those would mask long responses for being long. Single extreme tokens are handled
    by `truncated_importance_weights`. None: no bound on that side.
    Padding: ignored; a row without tokens is in range, as is one with a NaN, which must show
    in the loss and not disappear.
    """
    ratio = mean_log_ratio(zero_outside(old_logprobs - rollout_logprobs, mask), mask).exp()
    is_out = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        is_out = is_out | (ratio < low)
    if high is not None:
        is_out = is_out | (ratio > high)
    return ~is_out


@torch.no_grad()
def ratio_in_band(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    *,
    eps_low: float | int,
    eps_high: float | int,
) -> Bool[Tensor, "B T"]:
    """Mark the tokens that keep their loss in DIS: 1 - eps_low < pi / pi_rollout < 1 + eps_high.

    Source: SAO (arXiv 2607.07508). A ratio within rounding of a bound is on it, and not kept.
    """
    ratio = (logprobs - rollout_logprobs).exp()
    rounding = _ROUNDING * torch.finfo(ratio.dtype).eps
    is_above = ratio > (1.0 - eps_low) * (1.0 + rounding)
    return is_above & (ratio < (1.0 + eps_high) * (1.0 - rounding))


@torch.no_grad()
def probability_near(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    delta: float | int,
) -> Bool[Tensor, "B T"]:
    """Mark the tokens that keep their loss in DPPO.

    Their probability has not moved from pi_rollout by more than delta in the direction in which the
    advantage pushes it: up if the advantage is above 0, else down.

    Source: DPPO (arXiv 2602.04879). A move within rounding of delta is kept.
    """
    away = (logprobs.exp() - rollout_logprobs.exp()) * torch.where(advantages > 0, 1, -1)
    return away <= delta + _ROUNDING * torch.finfo(away.dtype).eps


@torch.no_grad()
def mean_log_ratio(gap: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Return for each response the mean of its tokens' log-ratios: the log of their geometric mean.

    `gap` are the log-ratios, which must be 0 where the mask is False. The mean is held within +-20,
    and is NaN where it is not finite.
    """
    return _limited(gap.sum(dim=1) / mask.sum(dim=1).clamp(min=1))


def _limited(log_ratio: Tensor) -> Tensor:
    """Hold log-ratios within +-20; log-ratios that are not finite become NaN."""
    limited = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(torch.isfinite(log_ratio), limited, torch.nan)


def _maximum(x: Tensor, mask: Tensor, reduce_max: Reduce) -> Tensor:
    """Return the maximum of x over the True entries of all ranks; -inf if there is none."""
    masked = torch.where(mask, x, -torch.inf)
    return reduce_max(masked.amax() if masked.numel() else masked.new_tensor(-torch.inf))


def _statistics(x: Tensor, mask: Tensor, reduce: Reduce, reduce_max: Reduce) -> RatioStatistics:
    masked = torch.where(mask, x, 0.0)
    total, count = reduce(torch.stack([masked.sum(), mask.sum().double()]))
    mean = total / count
    variance = reduce(torch.where(mask, x - mean, 0.0).square().sum()) / count
    return RatioStatistics(
        mean=mean,
        std=variance.sqrt(),
        min=-_maximum(-x, mask, reduce_max),
        max=_maximum(x, mask, reduce_max),
    )
