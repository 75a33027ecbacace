"""Advantages and value targets with a critic (GAE), returns, whitening.

Nothing here is differentiated. GAE is computed in float64 and returned in the inputs' dtype,
so a float32 result carries one rounding only, however long the response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.functional.masking import (
    Reduce,
    compact,
    compaction_index,
    identity,
    is_left_aligned,
    scatter_back,
    zero_outside,
)

_CPU_BLOCK = 16_384  # entries of a block of rows on a CPU: it fits the cache and takes one thread
_RELATIVE_VARIANCE_FLOOR = 1e-20  # below it a variance is rounding of equal numbers
_VARIANCE_EPS = 1e-8  # keeps the whitening of a constant batch finite


@torch.no_grad()
def gae(
    token_rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    gamma: float | int,
    lambda_: float | int | Float[Tensor, "B 1"],
) -> Float[Tensor, "B T"]:
    """Estimate the advantage of every sampled token, unwhitened.

        delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma * lambda * A_{t+1}

    Source: VAPO 2.2 (GAE, arXiv 1506.02438). t+1 is the next *sampled* token of the row, and
    V and A after the last one are 0, for truncated responses as well.
    Units: those of the reward.
    Padding: masked-out entries may hold anything and come back as 0; the mask may have gaps.
    Raises: ValueError when gamma or lambda is outside [0, 1].

    >>> r, v = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.5, 0.5]])
    >>> gae(r, v, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lambda_=0.5)
    tensor([[0.1250, 0.2500, 0.5000]])
    """
    dtype = torch.promote_types(token_rewards.dtype, values.dtype)
    decay = _decay(gamma, lambda_, values)
    blocks = []
    for rows in _row_blocks(values):
        rewards, state_values, index = _sampled_tokens(
            token_rewards[rows], values[rows], response_mask[rows]
        )
        deltas = _td_errors(rewards, state_values, gamma)
        blocks.append(_restore(discounted_suffix_sums(deltas, decay[rows]), index, dtype))
    return torch.cat(blocks)


@torch.no_grad()
def decoupled_gae(
    token_rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    gamma: float | int,
    lambda_policy: float | int | Float[Tensor, "B 1"],
    lambda_critic: float | int | Float[Tensor, "B 1"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Estimate advantages with one lambda and value targets with another.

        A_t = GAE(lambda_policy)_t
        R_t = GAE(lambda_critic)_t + V(s_t)

    Returns: the advantages A and the value targets R of all sampled tokens.

    Source: VAPO 4.1, VC-PPO 3.3. Component `decoupled_gae`; off: lambda_critic = lambda_policy,
    plain PPO's `advantages + values`. At lambda_critic = 1 the values cancel and the target is
    the Monte-Carlo return R_t = r_t + gamma * R_{t+1}; it is computed as that, so that not even
    rounding lets the current values in.
    Units: those of the reward.
    Padding: masked-out entries may hold anything; both results are 0 there.
    Raises: ValueError when gamma or a lambda is outside [0, 1].
    """
    advantages = gae(token_rewards, values, response_mask, gamma=gamma, lambda_=lambda_policy)
    if _is_one(lambda_critic):
        returns = monte_carlo_returns(token_rewards, response_mask, gamma=gamma)
        return advantages, returns.to(advantages.dtype)
    if _is_same(lambda_policy, lambda_critic):
        critic_advantages = advantages
    else:
        critic_advantages = gae(
            token_rewards, values, response_mask, gamma=gamma, lambda_=lambda_critic
        )
    return advantages, zero_outside(critic_advantages + values, response_mask)


def length_adaptive_lambda(
    lengths: Int[Tensor, " B"] | Float[Tensor, " B"], *, alpha: float | int
) -> Float[Tensor, "B 1"]:
    """Return a lambda for each response of l tokens, whose GAE weights then add up to alpha * l.

        sum_t lambda^t ~= 1 / (1 - lambda) = alpha * l
        lambda_policy   = 1 - 1 / (alpha * l)

    Source: VAPO 4.2. Component `length_adaptive_gae`; off: a constant. Deviation: the formula
    is negative for l < 1/alpha; clamped to [0, 1].
    In float64: rounded to float32, lambda^(l - 1) of 127,000 tokens is off by up to 0.4 %.
    Units: lengths in sampled tokens; alpha * l is a horizon in tokens.
    Raises: ValueError when alpha <= 0.

    >>> length_adaptive_lambda(torch.tensor([10, 32, 400]), alpha=0.05).flatten()
    tensor([0.0000, 0.3750, 0.9500], dtype=torch.float64)
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    lambda_ = 1.0 - 1.0 / (alpha * lengths.double())
    return lambda_.clamp(0.0, 1.0)[:, None]


def length_geometric_lambda(
    lengths: Int[Tensor, " B"] | Float[Tensor, " B"], *, k: float | int
) -> Float[Tensor, "B 1"]:
    """Return a lambda for each response of l tokens, whose l-th power is k.

        lambda_policy = k^(1/l)

    So about the share k of a final reward reaches the advantage of the first token at once,
    whatever the length; exactly it is k^((l-1)/l), `metrics.first_token_reward_weight`.

    Source: JustRL-II (k 0.5), Le Critique's code (k 0.4). k = exp(-1/alpha) is about
    `length_adaptive_lambda`. The result is in float64. A response without a token has lambda 0.
    Raises: ValueError when k is not in (0, 1].

    >>> length_geometric_lambda(torch.tensor([1, 4]), k=0.5).flatten()
    tensor([0.5000, 0.8409], dtype=torch.float64)
    """
    if not 0 < k <= 1:
        raise ValueError(f"k must be in (0, 1], got {k}")
    lambda_ = torch.pow(float(k), 1.0 / lengths.double())
    return torch.where(lengths > 0, lambda_, 0.0)[:, None]


def anchor_mask(
    response_mask: Bool[Tensor, "B T"], *, fractions: Sequence[float]
) -> Bool[Tensor, "B T"]:
    """Mark a few tokens of each response, at fractions of its length, for a sparse value loss.

        of n sampled tokens, those numbered min(round(fraction * (n - 1)), n - 2), from 0

    Source: SP3O (arXiv 2609.18708): 0.3, 0.6, 0.9, and 0.95 from 6144 tokens on, which the caller
    must add. Halves round to even, as in Python. Fractions may fall on the same token. The only
    token of a response of one token is marked. In longer responses the last token never is.
    Padding: False; only the True tokens of `response_mask` are counted.
    Raises: ValueError when there is no fraction, or one outside [0, 1].
    """
    if not fractions or not all(0 <= fraction <= 1 for fraction in fractions):
        raise ValueError(f"fractions must be in [0, 1], at least one, got {fractions}")
    num_tokens = response_mask.sum(dim=1, keepdim=True).double()
    numbers = response_mask.cumsum(dim=1) - 1
    is_anchor = torch.zeros_like(response_mask)
    for fraction in fractions:
        offsets = (fraction * (num_tokens - 1)).round().minimum(num_tokens - 2).clamp(min=0)
        is_anchor |= numbers == offsets
    return is_anchor & response_mask


@torch.no_grad()
def monte_carlo_returns(
    token_rewards: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    gamma: float | int,
) -> Float[Tensor, "B T"]:
    """Return the sum of the discounted rewards from each sampled token to the response's end.

        R_t = r_t + gamma * R_{t+1}

    Source: VAPO 4.1 (targets of value pretraining; what explained variance is measured on).
    Units: those of the reward.
    Padding: masked-out entries may hold anything and come back as 0; the mask may have gaps.
    Raises: ValueError when gamma is outside [0, 1].
    """
    no_values = torch.zeros((), dtype=token_rewards.dtype, device=token_rewards.device)
    return gae(
        token_rewards, no_values.expand_as(token_rewards), response_mask, gamma=gamma, lambda_=1.0
    )


@torch.no_grad()
def whiten(
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    returns: Float[Tensor, "B T"] | None = None,
    floor: float | int = 0.0,
    needs_contrast: bool = True,
    reduce: Reduce = identity,
) -> Float[Tensor, "B T"]:
    """Shift and scale advantages to mean 0 and (population) variance 1 over all True tokens.

        A <- (A - mean) / sqrt(variance + 1e-8)
        with a floor f:   A <- (A - mean) / sqrt(max(variance, f^2 * variance of R) + 1e-8)
        with R constant:  A <- 0                    if `needs_contrast`

    R are the `returns` of the same tokens. If they are None, there is neither a floor nor that 0.
    `needs_contrast` is right for advantages that come from these returns and a critic alone: if all
    returns are equal, they differ only by the critic's noise. Without a floor, advantages are
    trained at unit size however small they are.
    `reduce` adds sums up over ranks, so every rank uses the moments of all ranks.

    Source: not stated in the paper; whitening has its own switch. The floor: this repository.
    Padding: ignored, and 0 in the result. Constant advantages become 0, not NaN.
    """
    columns = [zero_outside(x, mask).double() for x in (advantages, returns) if x is not None]
    *totals, count = reduce(torch.stack([*(x.sum() for x in columns), mask.sum()]))
    means = [total / count.clamp(min=1) for total in totals]
    centered = [torch.where(mask, x - m, 0.0) for x, m in zip(columns, means, strict=True)]
    squares = reduce(torch.stack([x.square().sum() for x in centered]))
    variance, *of_returns = squares / count.clamp(min=1)
    shifted = centered[0]
    if of_returns:
        is_constant = of_returns[0] <= _RELATIVE_VARIANCE_FLOOR * means[1].square()
        shifted = torch.where(is_constant, 0.0, shifted) if needs_contrast else shifted
        variance = torch.maximum(variance, floor**2 * of_returns[0])
    return (shifted * (variance + _VARIANCE_EPS).rsqrt()).to(advantages.dtype)


def discounted_suffix_sums(
    x: Float[Tensor, "B T"], decay: Float[Tensor, "B 1"]
) -> Float[Tensor, "B T"]:
    """Return the sums y_t = x_t + decay * y_{t+1} along each row, without a loop over T.

    y after the last column is 0.

    Recursive doubling: y^(k) adds up the first 2^k terms, so that ceil(log2 T) passes do.

        y^(0)_t   = x_t
        y^(k+1)_t = y^(k)_t + decay^(2^k) * y^(k)_{t + 2^k}

    With decay in [0, 1], constant along a row, no power overflows.

    >>> x, half = torch.tensor([[4.0, 2.0, 8.0]]), torch.tensor([[0.5]])
    >>> discounted_suffix_sums(x, half)
    tensor([[7., 6., 8.]])
    """
    y, power, shift = x.clone(), decay, 1
    while shift < y.shape[1]:
        y[:, :-shift].add_(power * y[:, shift:])
        power, shift = power.square(), 2 * shift
    return y


def _row_blocks(x: Tensor) -> list[slice]:
    """Cut the rows of x into slices: small ones on a CPU, elsewhere one slice of all rows."""
    num_rows, num_columns = x.shape
    size = max(1, num_rows)
    if x.device.type == "cpu":
        size = min(size, max(1, _CPU_BLOCK // max(1, num_columns)))
    return [slice(start, start + size) for start in range(0, max(1, num_rows), size)]


def _td_errors(rewards: Tensor, values: Tensor, gamma: float | int) -> Tensor:
    """Return r_t + gamma * V(s_{t+1}) - V(s_t); rows have no gaps, and V is 0 after their end."""
    deltas = rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    return deltas


def _sampled_tokens(
    token_rewards: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return float64 rewards and values with the sampled tokens leftmost, followed by 0.

    The third result is the index for `scatter_back`; None: the tokens were leftmost already.
    """
    if is_left_aligned(mask):
        rewards, values = zero_outside(token_rewards, mask), zero_outside(values, mask)
        return rewards.double(), values.double(), None
    index = compaction_index(mask)
    return compact(token_rewards.double(), index), compact(values.double(), index), index


def _restore(x: Tensor, index: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Move the numbers of sampled tokens back to their columns, and convert them to a dtype.

    `index` is the third result of `_sampled_tokens`; if it is None, they are there already.
    """
    return (x if index is None else scatter_back(x, index)).to(dtype)


def _decay(gamma: float | int, lambda_: float | int | Tensor, like: Tensor) -> Tensor:
    """Return gamma * lambda as [B, 1] in float64, with the rows and on the device of `like`.

    Raises: ValueError: gamma or lambda is outside [0, 1].
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    column = torch.as_tensor(lambda_, dtype=torch.float64, device=like.device)
    if not bool(((column >= 0) & (column <= 1)).all()):
        raise ValueError(f"lambda must be in [0, 1], got {lambda_}")
    return (gamma * column).expand(like.shape[0], 1)


def _is_one(lambda_: float | int | Tensor) -> bool:
    return bool((lambda_ == 1).all()) if isinstance(lambda_, Tensor) else lambda_ == 1


def _is_same(a: float | int | Tensor, b: float | int | Tensor) -> bool:
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
