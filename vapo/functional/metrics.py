"""Diagnostics of an update: numbers to look at, never differentiated.

Those that take `reduce`, which adds a tensor of sums up over ranks, work on float64 sums. So the
logged number is the one over all True tokens of all ranks, not a mean of means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.functional.logprobs import gradient_weights
from vapo.functional.masking import Reduce, identity, zero_outside

_RELATIVE_VARIANCE_FLOOR = 1e-20  # below it a variance is rounding of equal numbers


@torch.no_grad()
def explained_variance(
    values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    reduce: Reduce = identity,
) -> Float[Tensor, ""]:
    """Return the share of the returns' variance that the values account for, over all ranks.

        1 - Var(R - V) / Var(R)

    1 is a perfect critic (up to a constant), 0 an uninformative one, negative a harmful one.
    Give it Monte-Carlo returns: against lambda < 1 targets, which contain V, it looks near 1.
    Source: VAPO 4.1 (the criterion of value pretraining).
    Padding: ignored. NaN when there is no token or all returns are equal (0/0): skip it then.
    """
    target = zero_outside(returns, mask).double()
    error = target - zero_outside(values, mask).double()
    means, variances = _moments([target, error], mask, reduce)
    is_constant = variances[0] <= _RELATIVE_VARIANCE_FLOOR * means[0].square()
    ratio = torch.where(is_constant, torch.nan, variances[1] / variances[0])
    return (1.0 - ratio).to(values.dtype)


@torch.no_grad()
def advantage_variance_ratio(
    values: Float[Tensor, "B T"],
    baselines: Float[Tensor, " B"],
    returns: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    reduce: Reduce = identity,
) -> Float[Tensor, ""]:
    """Return the variance of advantages against values, divided by that against a baseline.

        Var(R_t - V(s_t)) / Var(R_t - B)

    B is one number a response, as the mean reward of its prompt's other responses. Below 1 the
    values leave less noise than B, above 1 more. The advantages are those at lambda 1, because at a
    smaller lambda the variance of GAE falls for any values, even constant ones.
    Source: this repository; NeMo-RL logs a ratio of this kind.
    Padding: ignored. NaN when there is no token or B leaves nothing of the returns (x/0).
    """
    return _ratio_of_moments(values, baselines, returns, mask, reduce)


@torch.no_grad()
def gradient_noise_ratio(
    values: Float[Tensor, "B T"],
    baselines: Float[Tensor, " B"],
    returns: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    reduce: Reduce = identity,
) -> Float[Tensor, ""]:
    """Return the noise of the policy's gradient with values, divided by that with a baseline.

        sum (1 - p_t)^2 (R_t - V(s_t) - mean)^2 / sum (1 - p_t)^2 (R_t - B - mean)^2

    p_t is the probability with which token t was sampled. The gradient of log p_t with respect to
    the token's logit is 1 - p_t, so an advantage on a token that was nearly certain adds no noise,
    whatever its size. Each mean is that of the advantages over all tokens, as whitening takes it
    away. Both kinds of advantages, at lambda 1, have the same expected gradient. So the ratio says
    which share of the responses is needed with the critic for a gradient that is as exact, as far
    as tokens are independent.
    Source: this repository; the squared gradient as a weight is that of the optimal baseline
    (Greensmith, Bartlett and Baxter 2004).
    Padding: ignored. NaN when there is no token or B leaves no noise (x/0).
    """
    weights = gradient_weights(zero_outside(logprobs, mask))
    return _ratio_of_moments(values, baselines, returns, mask, reduce, weights=weights)


@torch.no_grad()
def mean_of_other_responses(
    rewards: Float[Tensor, " B"],
    groups: Int[Tensor, " B"],
    *,
    counted: Bool[Tensor, " B"],
    reduce: Reduce = identity,
) -> Float[Tensor, " B"]:
    """Return for each response the mean reward of its prompt's other responses.

    Groups may have any sizes: `groups` has the number of each response's prompt, from 0. A response
    that is alone in its group gets the mean of all other responses of all ranks. Only responses
    that are `counted` enter a mean.
    Units: those of the reward. NaN where there is no other response at all.

    >>> rewards, groups = torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 1])
    >>> mean_of_other_responses(rewards, groups, counted=torch.ones(4, dtype=torch.bool))
    tensor([0.0000, 0.5000, 0.5000, 0.3333])
    """
    counted_rewards, weights = torch.where(counted, rewards.double(), 0.0), counted.double()
    per_group = counted_rewards.new_zeros(2, len(counted_rewards)).index_add_(
        1, groups, torch.stack([counted_rewards, weights])
    )
    total, count = per_group[:, groups]
    all_total, all_count = reduce(torch.stack([counted_rewards.sum(), weights.sum()]))
    is_alone = count - weights < 1
    others_sum = torch.where(is_alone, all_total, total) - counted_rewards
    return (others_sum / (torch.where(is_alone, all_count, count) - weights)).to(rewards.dtype)


class ValueBias(NamedTuple):
    """The result of `value_bias`: `mean` is by how much the values are too high on average.

    `share` is the size of `mean` divided by the standard deviation of the returns.
    """

    mean: Tensor
    share: Tensor


@torch.no_grad()
def value_bias(
    values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    reduce: Reduce = identity,
) -> ValueBias:
    """Measure by how much the values are too high on average; explained variance ignores this.

        mean  = mean(V - R)
        share = |mean| / std(R)        population std

    Source: this repository.
    Units: those of the reward; the share has none.
    Padding: ignored. Both NaN when there is no token, the share also when all returns are equal.
    """
    target = zero_outside(returns, mask).double()
    error = zero_outside(values, mask).double() - target
    means, variances = _moments([target, error], mask, reduce)
    is_constant = variances[0] <= _RELATIVE_VARIANCE_FLOOR * means[0].square()
    share = torch.where(is_constant, torch.nan, means[1].abs() / variances[0].sqrt())
    return ValueBias(means[1].to(values.dtype), share.to(values.dtype))


@torch.no_grad()
def first_token_reward_weight(
    lengths: Int[Tensor, " B"] | Float[Tensor, " B"], lambda_: float | int | Float[Tensor, "B 1"]
) -> Float[Tensor, " B"]:
    """Return the share of the final reward that reaches the first token's advantage at once.

        weight = lambda^(l - 1)        gamma 1; all other reward must come by way of the values

    With lambda = 1 - 1/(alpha l) it is about exp(-1/alpha) for long responses, and 0 for
    1 < l <= 1/alpha; with lambda = k^(1/l) it is k^((l-1)/l), about k.
    Source: the recursion of GAE (JustRL-II's notes call it exactly k, which is lambda^l).
    A response without a token has 0. In float64, returned in float32.
    """
    column = torch.as_tensor(lambda_, dtype=torch.float64, device=lengths.device)
    exponents = (lengths.double() - 1).clamp(min=0)
    weights = column.expand(len(lengths), 1)[:, 0] ** exponents
    return torch.where(lengths > 0, weights, 0.0).float()


@torch.no_grad()
def clipped_tokens(
    ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    eps_low: float | int,
    eps_high: float | int,
) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return two masks: the tokens whose gradient the lower, and the upper clip bound cuts off.

        low:   ratio < 1 - eps_low  and A < 0
        high:  ratio > 1 + eps_high and A > 0

    A ratio outside the bounds on the other side of A still has its gradient.
    """
    is_low = (ratio < 1.0 - eps_low) & (advantages < 0)
    return is_low, (ratio > 1.0 + eps_high) & (advantages > 0)


@torch.no_grad()
def clip_fractions(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    eps_low: float | int,
    eps_high: float | int,
) -> tuple[Int[Tensor, ""], Int[Tensor, ""]]:
    """Count the tokens whose gradient the lower, and the upper clip bound cuts off.

    The caller divides the two counts by the minibatch's number of tokens.
    Padding: ignored.
    """
    ratio = (logprobs - old_logprobs).exp()
    low, high = clipped_tokens(ratio, advantages, eps_low=eps_low, eps_high=eps_high)
    return (mask & low).sum(), (mask & high).sum()


@torch.no_grad()
def approx_kl(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, ""]:
    """Return the mean of k3 over tokens sampled from pi_old: it estimates KL(pi_old || pi_theta).

        k3 = ratio - 1 - log ratio,  ratio = pi_theta / pi_old      (never negative)

    Units: nats per token.
    Padding: ignored; NaN when there is no token.
    """
    log_ratio = zero_outside(logprobs - old_logprobs, mask)
    k3 = zero_outside(torch.expm1(log_ratio) - log_ratio, mask)
    return (k3.double().sum() / mask.sum()).to(log_ratio.dtype)


class PositionProfile(NamedTuple):
    """The result of `mean_by_position`: statistics of each bin of token positions.

    `mean` and `std` are NaN where a bin has no token.
    """

    num_tokens: Tensor
    mean: Tensor
    std: Tensor


@torch.no_grad()
def mean_by_position(
    x: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    bin_tokens: int,
    num_bins: int,
    reduce: Reduce = identity,
) -> PositionProfile:
    """Return the mean and std of x over each bin of token positions, of all responses of all ranks.

    Bin 0 has the sampled tokens 0 to bin_tokens - 1 of each response, bin 1 the next bin_tokens.

    Source: VC-PPO figures 2-3 (mean value and mean advantage against token position: with a
    critic straight from a reward model, values rise along the response, and the first tokens
    get the largest advantages). std is the population's.
    Units: position in sampled tokens. Tokens past the last bin are left out.
    Padding: ignored, not counted as positions.
    """
    is_used, bins = _position_bins(mask, bin_tokens=bin_tokens, num_bins=num_bins)
    samples = x[is_used].double()
    ones = torch.ones_like(samples)
    count, total = reduce(torch.stack([_bin_sums(y, bins, num_bins) for y in (ones, samples)]))
    mean = total / count
    variance = reduce(_bin_sums((samples - mean[bins]).square(), bins, num_bins)) / count
    return PositionProfile(count.long(), mean.to(x.dtype), variance.sqrt().to(x.dtype))


@torch.no_grad()
def explained_variance_by_position(
    values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    bin_tokens: int,
    num_bins: int,
    reduce: Reduce = identity,
) -> Float[Tensor, " bins"]:
    """Return the explained variance of the returns by the values in each bin of token positions.

    Bin 0 has the sampled tokens 0 to bin_tokens - 1 of each response, bin 1 the next bin_tokens.
    A critic that uses the response explains more towards its end; one that judges by the
    prompt alone explains the same everywhere.
    Padding: ignored. NaN where a bin has no token or all of its returns are equal.
    """
    is_used, bins = _position_bins(mask, bin_tokens=bin_tokens, num_bins=num_bins)
    target = returns[is_used].double()
    error = target - values[is_used].double()
    sums = [_bin_sums(y, bins, num_bins) for y in (torch.ones_like(target), target, error)]
    count, sum_target, sum_error = reduce(torch.stack(sums))
    mean_target, mean_error = sum_target / count, sum_error / count
    deviations = ((target - mean_target[bins]).square(), (error - mean_error[bins]).square())
    squares = reduce(torch.stack([_bin_sums(y, bins, num_bins) for y in deviations]))
    var_target, var_error = squares / count
    is_constant = var_target <= _RELATIVE_VARIANCE_FLOOR * mean_target.square()
    ratio = torch.where(is_constant, torch.nan, var_error / var_target)
    return (1.0 - ratio).to(values.dtype)


class Calibration(NamedTuple):
    """The result of `calibration`: statistics of the tokens in each bin of values.

    `num_clusters` is the number of prompts with a token in the bin. The means are NaN where a bin
    has no token.
    """

    num_tokens: Tensor
    num_clusters: Tensor
    mean_value: Tensor
    mean_return: Tensor
    standard_error: Tensor


@torch.no_grad()
def calibration(
    values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    edges: Float[Tensor, " edges"],
    cluster_size: int = 1,
    reduce: Reduce = identity,
) -> Calibration:
    """Average values and returns of the tokens of each bin of values: edges[i] <= V < edges[i + 1].

    A calibrated critic has mean_return = mean_value in every bin. Values outside the edges are
    counted in the first or last bin. `standard_error` is that of mean_return with each
    `cluster_size` rows (the responses to one prompt) as one draw, because the tokens of a
    response share one return:

        se^2 = K / (K - 1) * sum_k (sum over tokens t of cluster k of (R_t - mean))^2 / n^2

    K the clusters with a token in the bin; NaN for K < 2.
    Padding: ignored.
    """
    num_bins = len(edges) - 1
    bins = torch.bucketize(values[mask].double(), edges[1:-1].double(), right=True)
    predicted, achieved = values[mask].double(), returns[mask].double()
    terms = (torch.ones_like(predicted), predicted, achieved)
    sums = reduce(torch.stack([_bin_sums(y, bins, num_bins) for y in terms]))
    count, mean_value, mean_return = sums[0], sums[1] / sums[0], sums[2] / sums[0]
    num_clusters = -(-len(mask) // cluster_size)
    cluster_bins = (mask.nonzero()[:, 0] // cluster_size) * num_bins + bins
    shape = (num_clusters, num_bins)
    residuals = _bin_sums(achieved - mean_return[bins], cluster_bins, num_clusters * num_bins)
    is_hit = _bin_sums(torch.ones_like(achieved), cluster_bins, num_clusters * num_bins) > 0
    per_bin = [residuals.view(shape).square().sum(0), is_hit.view(shape).double().sum(0)]
    squares, hits = reduce(torch.stack(per_bin))
    variance = torch.where(hits > 1, hits / (hits - 1) * squares, torch.nan)
    return Calibration(count.long(), hits.long(), mean_value, mean_return, variance.sqrt() / count)


def _ratio_of_moments(
    values: Float[Tensor, "B T"],
    baselines: Float[Tensor, " B"],
    returns: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    reduce: Reduce,
    *,
    weights: Float[Tensor, "B T"] | float = 1.0,
) -> Float[Tensor, ""]:
    """Divide the mean squared deviation of R - V by that of R - B; NaN if the latter is 0.

    R are the returns, V the values, B the baselines. Each squared deviation counts with its weight.
    """
    target = zero_outside(returns, mask).double()
    against_values = target - zero_outside(values, mask).double()
    against_baseline = torch.where(mask, target - baselines.double()[:, None], 0.0)
    columns = [target, against_values, against_baseline]
    means, moments = _moments(columns, mask, reduce, weights=weights)
    is_constant = moments[2] <= _RELATIVE_VARIANCE_FLOOR * (moments[0] + means[0].square())
    return torch.where(is_constant, torch.nan, moments[1] / moments[2]).to(values.dtype)


def _moments(
    columns: list[Float[Tensor, "B T"]],
    mask: Bool[Tensor, "B T"],
    reduce: Reduce,
    *,
    weights: Float[Tensor, "B T"] | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return each column's mean, and its mean squared deviation from that mean, over all ranks.

    The deviations are multiplied by the weights; weights of 1 give the population variance. Columns
    must be 0 outside the mask.
    """
    count, *sums = reduce(torch.stack([mask.sum(), *(x.sum() for x in columns)]))
    means = torch.stack(sums) / count
    centered = [torch.where(mask, x - m, 0.0) for x, m in zip(columns, means, strict=True)]
    squares = torch.stack([(weights * x.square()).sum() for x in centered])
    return means, reduce(squares) / count


def _position_bins(
    mask: Tensor, *, bin_tokens: int, num_bins: int
) -> tuple[Bool[Tensor, "B T"], Int[Tensor, " n"]]:
    """Return a mask of the tokens that are in a bin of positions, and each such token's bin number.

    Bin 0 has the sampled tokens 0 to bin_tokens - 1 of each response. Tokens past the last bin are
    in none.
    """
    position_bin = (mask.cumsum(dim=1) - 1) // bin_tokens
    is_used = mask & (position_bin < num_bins)
    return is_used, position_bin[is_used]


def _bin_sums(x: Float[Tensor, " n"], bins: Int[Tensor, " n"], num_bins: int) -> Tensor:
    """Sum x over the tokens of each bin."""
    return x.new_zeros(num_bins).index_add_(0, bins, x)
