"""Advantages between a critic's and a baseline's: mixed, tethered, or one of the two by a gate.

Nothing here is differentiated. The critic's advantages are GAE's, per token; a baseline's are
one number a response (`baselines`), given as a column.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.functional.masking import Reduce, at_least_float32, identity, zero_outside
from vapo.functional.metrics import explained_variance


@torch.no_grad()
def linear_mix(
    advantages: Float[Tensor, "B T"],
    baseline_advantages: Float[Tensor, " B #T"],
    mask: Bool[Tensor, "B T"],
    *,
    rho: float | int | Float[Tensor, ""],
) -> Float[Tensor, "B T"]:
    """Mix the critic's advantages with those against a baseline, by the weight rho.

        A = rho * A_critic + (1 - rho) * A_baseline

    Source: Le Critique (arXiv 2608.16739) as in public code: rho 0.5, leave-one-out baseline.
    Units: those of the reward. rho is not held within [0, 1].
    Padding: ignored, and 0 in the result.
    """
    from_baseline = torch.where(mask, baseline_advantages, 0.0) * (1.0 - rho)
    return zero_outside(at_least_float32(advantages), mask) * rho + from_baseline


@torch.no_grad()
def tether_advantages(
    values: Float[Tensor, "B T"],
    baselines: Float[Tensor, "#B #T"] | Float[Tensor, ""],
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    rho: float | int | Float[Tensor, ""],
) -> Float[Tensor, "B T"]:
    """Turn advantages against the critic's values V into ones against (1 - rho) * B + rho * V.

        A <- A + (1 - rho) * (V - B)

    B are other baselines, as the mean reward of the prompt's other responses. rho 1 gives the
    critic's advantages, rho 0 those against B; at lambda 1 the result is that of `linear_mix`.
    `tether_fit` fits rho, on *earlier* groups.

    Source: TETHER, in the version of `tether_fit`.
    Units: those of the reward.
    Padding: ignored, and 0 in the result.
    """
    shift = torch.where(mask, at_least_float32(values) - baselines, 0.0) * (1.0 - rho)
    return zero_outside(at_least_float32(advantages), mask) + shift


@torch.no_grad()
def tether_fit(
    values: Float[Tensor, "B T"],
    baselines: Float[Tensor, "#B #T"] | Float[Tensor, ""],
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    ridge: float | int,
    reduce: Reduce = identity,
) -> Float[Tensor, ""]:
    """Return the best weight rho of the critic's value V beside a baseline B (TETHER).

        F = V - B,  y = A + F = (lambda-return) - B        A from GAE, B e.g. leave-one-out mean
        rho = (sum F y / W) / (sum F^2 / W + ridge * max(sum F^2 / W, sum y^2 / W)), W tokens

    The mixed baseline is B + rho * F, fitted by least squares of y on F without intercept.
    Source: Le Critique (arXiv 2608.16739) as in public code, which may not be the paper's; other
    versions clip rho or have two of them. rho is not clipped here, and is for *later* groups only:
    `lagged_rho`.
    Padding: ignored. NaN, to be skipped, when there is no token or V = B on all of them.
    `reduce` adds the sums up over ranks. Raises: ValueError when ridge is negative.
    """
    if not ridge >= 0:
        raise ValueError(f"ridge must be >= 0, got {ridge}")
    feature = torch.where(mask, values.double() - baselines.double(), 0.0)
    target = torch.where(mask, advantages.double() + feature, 0.0)
    sums = [mask.sum(), feature.square().sum(), (feature * target).sum(), target.square().sum()]
    count, *products = reduce(torch.stack([x.double() for x in sums]))
    feature_power, product, target_power = (x / count for x in products)
    rho = product / (feature_power + ridge * torch.maximum(feature_power, target_power))
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.where(feature_power > 0, rho, torch.nan).to(dtype)


def lagged_rho(rho: float, fitted_rho: float, *, decay: float | int) -> float:
    """Return the running mean of the rho that `tether_fit` fits in each iteration.

        rho <- decay * rho + (1 - decay) * fitted_rho

    The next iteration uses it. An iteration without a fit (NaN) leaves rho as it is.
    Source: Le Critique (arXiv 2608.16739) as in public code: decay 0.9, rho 0 before the first fit,
    and no correction for that start.
    Raises: ValueError when decay is not in [0, 1].

    >>> round(lagged_rho(0.0, 1.2069, decay=0.9), 4)
    0.1207
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    return decay * rho + (1.0 - decay) * fitted_rho if math.isfinite(fitted_rho) else rho


@torch.no_grad()
def gate_explained_variance(
    values: Float[Tensor, " B"], rewards: Float[Tensor, " B"], *, reduce: Reduce = identity
) -> Float[Tensor, ""]:
    """Return the explained variance of rewards by values, which chooses a batch's advantages.

        EV = 1 - Var(R - V) / Var(R)

    If EV is above a threshold of the config, by default 0, the batch is trained on the critic's
    advantages, otherwise on advantages against the mean reward.

    Source: EVPO (arXiv 2604.19485), which does not say whether over tokens or responses, nor which
    value; public code takes responses. Here the B entries are what the caller chooses, with values
    from before the update. If all rewards are equal or there is no entry, EV is 0, which chooses
    the mean reward. A NaN among the inputs gives NaN.
    """
    columns = (at_least_float32(values)[:, None], rewards[:, None])
    explained = explained_variance(*columns, torch.ones_like(columns[0]).bool(), reduce=reduce)
    is_constant = explained.isnan() & values.isfinite().all() & rewards.isfinite().all()
    return torch.where(is_constant, 0.0, explained)


@torch.no_grad()
def batch_mean_advantages(
    rewards: Float[Tensor, " B"],
    *,
    counted: Bool[Tensor, " B"] | None = None,
    reduce: Reduce = identity,
) -> Float[Tensor, " B"]:
    """Score each response against the mean reward of the batch on all ranks, unscaled.

        A_i = r_i - mean(r)

    counted: the responses that are not fillers, over which the mean is; None: all.

    Source: EVPO (arXiv 2604.19485), for batches in which it does not use the critic. It does not
    say whether the mean is the batch's or the group's; this is the batch's. Equal rewards give 0 up
    to rounding.
    Units: those of the reward.

    >>> batch_mean_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """
    r = rewards.double()
    weights = torch.ones_like(r) if counted is None else counted.to(r.dtype)
    total, count = reduce(torch.stack([(weights * r).sum(), weights.sum()]))
    return (r - total / count.clamp(min=1)).to(torch.promote_types(rewards.dtype, torch.float32))


@torch.no_grad()
def mean_of_batch_others(
    rewards: Float[Tensor, " B"],
    *,
    counted: Bool[Tensor, " B"] | None = None,
    reduce: Reduce = identity,
) -> Float[Tensor, " B"]:
    """Return for each response the mean reward of all others in the batch that are counted.

    It replaces the mean over a prompt's other responses where each prompt has one response. In a
    batch of one counted response there are no others, and it is 0 for that response.

    counted: the responses that are not fillers; None: all. `reduce` adds sums up over ranks.
    Units: those of the reward.

    >>> mean_of_batch_others(torch.tensor([3.0, 1.0, 0.0]))
    tensor([0.5000, 1.5000, 2.0000])
    """
    weights = torch.ones_like(rewards) if counted is None else counted.to(rewards.dtype)
    weights = weights.double()
    total, count = reduce(torch.stack([(weights * rewards).sum(), weights.sum()]))
    others_mean = (total - weights * rewards) / (count - weights).clamp(min=1)
    return others_mean.to(torch.promote_types(rewards.dtype, torch.float32))


@torch.no_grad()
def ensemble_spread(values: Float[Tensor, "*n M"]) -> Float[Tensor, "*n"]:
    """Compute the standard deviation over the M critics of an ensemble, with denominator M.

        sqrt(mean_m (V_m - V)^2), V the mean

    Source: AsyPPO (arXiv 2510.01656), which does not state the denominator. Members that are equal
    to the last bit give exactly 0, so that they mask nothing (`masking.lowest_share_mask`).
    Units: those of the values.

    >>> ensemble_spread(torch.tensor([[0.0, 1.0], [0.3, 0.3]]))
    tensor([0.5000, 0.0000])
    """
    return (values - values[..., :1]).std(dim=-1, correction=0)


def ensemble_mean(values: Float[Tensor, "*n M"]) -> Float[Tensor, "*n"]:
    """Compute the mean over the M critics of an ensemble, the value of AsyPPO (arXiv 2510.01656).

    Members that are equal to the last bit give exactly their value.
    """
    first = values[..., 0]
    return first + (values - values[..., :1]).mean(dim=-1)
