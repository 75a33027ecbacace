"""Losses of the actor's tokens that other systems use instead of PPO's clipped surrogate.

VAPO's own is `losses.clipped_surrogate`. `log pi` are the log-probs of the current policy,
`log old` those of the policy before the iteration's update, and `log mu` those of the policy that
sampled. sg(x) is x without its gradient. `losses.aggregate` reduces each of these losses.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.functional.masking import at_least_float32, zero_outside
from vapo.functional.mismatch import (
    MAX_LOG_RATIO,
    mean_log_ratio,
    probability_near,
    ratio_in_band,
)


def gspo_surrogate(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    eps_low: float | int,
    eps_high: float | int,
) -> Float[Tensor, "B T"]:
    """Return GSPO's loss of every token, to be minimised.

        s      = exp(mean over a response's sampled tokens of (log pi - log old))
        s_t    = sg(s) * pi_t / sg(pi_t)                       s in value, a gradient for each t
        loss_t = -min(s_t * A_t, clip(s_t, 1 - eps_low, 1 + eps_high) * A_t)

    This is GSPO-token, which takes an advantage for each token, as a critic gives it. Where all
    advantages of a response are equal, the mean over its tokens is GSPO's loss
    -min(s A, clip(s) A). The gradients are equal too, because the gradient of s is s times the mean
    of the gradients of log pi_t. So the loss is for the reduction `sequence_mean`.
    Source: GSPO (arXiv 2507.18071), equations 5, 7 and 13 (there 3e-4 and 4e-4). Deviation: the
    mean log-ratio is held within +-20.
    Padding: tokens outside `response_mask`, as those between two turns, are not in the mean,
    whatever they hold. A sampled token with a non-finite log-prob makes the loss of its whole
    response NaN. A token with a non-finite advantage makes its own loss NaN.
    Raises: ValueError when a bound is not above 0.
    """
    if not (eps_low > 0 and eps_high > 0):
        raise ValueError(f"clip bounds must be above 0, got {eps_low} and {eps_high}")
    logprobs, old_logprobs = at_least_float32(logprobs), at_least_float32(old_logprobs.detach())
    advantages = advantages.detach().to(logprobs.dtype)
    gap = zero_outside(logprobs.detach() - old_logprobs, response_mask)
    sequence_ratio = mean_log_ratio(gap, response_mask).exp()[:, None]
    is_valid = torch.isfinite(logprobs) & torch.isfinite(advantages) & sequence_ratio.isfinite()
    log_pi, advantages = (torch.where(is_valid, x, 0.0) for x in (logprobs, advantages))
    ratio = torch.where(is_valid, sequence_ratio, 1.0) * (log_pi - log_pi.detach()).exp()
    clipped_ratio = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    return torch.where(is_valid, loss, torch.nan)


def cispo_surrogate(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    eps_low: float | int | None,
    eps_high: float | int,
) -> Float[Tensor, "B T"]:
    """Return CISPO's loss of every token, to be minimised.

        ratio  = exp(log pi - log old)
        loss_t = -sg(clip(ratio, 1 - eps_low, 1 + eps_high)) * A * log pi

    The weight is clipped and not the update, so that every token keeps its gradient, whatever its
    ratio and the sign of A.
    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5. eps_low None: no lower bound, as
    there. Deviation: the log-ratio is held within +-20.
    Padding: there is no mask here. A token with a non-finite input gets loss NaN and no gradient.
    Raises: ValueError when a bound is negative.
    """
    if not (eps_high >= 0 and (eps_low is None or eps_low >= 0)):
        raise ValueError(f"clip bounds must be >= 0, got {eps_low} and {eps_high}")
    is_valid, log_pi, log_old, advantages = _finite_inputs(logprobs, old_logprobs, advantages)
    ratio = (log_pi - log_old).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = ratio.clamp(min=None if eps_low is None else 1.0 - eps_low, max=1.0 + eps_high)
    return torch.where(is_valid, -weights * advantages * log_pi, torch.nan)


def dis_surrogate(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    eps_low: float | int,
    eps_high: float | int,
) -> Float[Tensor, "B T"]:
    """Return SAO's loss of every token (DIS), to be minimised.

        r      = exp(logprobs - rollout_logprobs)
        f(r)   = r if 1 - eps_low < r < 1 + eps_high, else 0      whatever the sign of A
        loss_t = -sg(f(r)) * A * log pi

    sg(x) is x without its gradient. Tokens with f(r) = 0 are counted in the denominator all the
    same.
    Source: SAO (arXiv 2607.07508). There is no old policy, and no further importance weight: r
    corrects for the engine. Ports differ; here the bounds are excluded as in the paper (a ratio
    within rounding of a bound is on it), and no gradient goes through f(r).
    Padding: there is no mask here. A token with a non-finite input gets loss NaN and no gradient.
    Raises: ValueError when a bound is not above 0.
    """
    if not (eps_low > 0 and eps_high > 0):
        raise ValueError(f"the band's bounds must be above 0, got {eps_low} and {eps_high}")
    is_valid, log_pi, log_mu, advantages = _finite_inputs(logprobs, rollout_logprobs, advantages)
    is_kept = ratio_in_band(log_pi, log_mu, eps_low=eps_low, eps_high=eps_high)
    ratio = (log_pi - log_mu).detach().exp()
    loss = -torch.where(is_kept, ratio, 0.0) * advantages * log_pi
    return torch.where(is_valid, loss, torch.nan)


def dppo_surrogate(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    delta: float | int,
) -> Float[Tensor, "B T"]:
    """Return DPPO's loss of every token (binary total variation, as in BPCO), to be minimised.

        pi, mu = exp(logprobs), exp(rollout_logprobs)
        M      = sg([pi - mu <= delta] if A > 0 else [pi - mu >= -delta])
        loss_t = -A * (pi / mu) * M

    sg(x) is x without its gradient.
    Source: DPPO (arXiv 2602.04879) in the form of BPCO's code (2608.23566): the ratio has its
    gradient and no cap (another port: the log-prob's, ratio capped at 20, without gradient).
    Deviation: the log-ratio is held within +-20, and has no gradient beyond.
    Padding: there is no mask here. A token with a non-finite input gets loss NaN and no gradient.
    Raises: ValueError when delta is negative.
    """
    if not delta >= 0:
        raise ValueError(f"delta must be >= 0, got {delta}")
    is_valid, log_pi, log_mu, advantages = _finite_inputs(logprobs, rollout_logprobs, advantages)
    ratio = (log_pi - log_mu).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_kept = probability_near(log_pi, log_mu, advantages, delta=delta)
    loss = -advantages * torch.where(is_kept, ratio, 0.0)
    return torch.where(is_valid, loss, torch.nan)


def logprob_surrogate(
    logprobs: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return the policy-gradient loss of every token, to be minimised.

        loss_t = -A * log pi

    Source: REINFORCE, as in RLOO (arXiv 2402.14740) and ReMax (2310.10505); with A = 1 it is
    the language-modelling loss (RAFT). Its gradient is the policy gradient only where the
    tokens were sampled from pi itself: nothing here corrects for an older policy.
    Padding: there is no mask here. A token with a non-finite input gets loss NaN and no gradient.
    """
    is_valid = torch.isfinite(logprobs) & torch.isfinite(advantages)
    loss = -torch.where(is_valid, advantages, 0.0) * torch.where(is_valid, logprobs, 0.0)
    return torch.where(is_valid, loss, torch.nan)


def _finite_inputs(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a mask of the tokens whose three inputs are finite, and the inputs with 0 elsewhere.

    Only `logprobs` keep their gradient.
    """
    inputs = (logprobs, rollout_logprobs.detach(), advantages.detach())
    is_valid = torch.stack([torch.isfinite(x) for x in inputs]).all(dim=0)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    first, second, third = (torch.where(is_valid, x.to(dtype), 0.0) for x in inputs)
    return is_valid, first, second, third
