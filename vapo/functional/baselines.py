"""Advantages without a critic: a response's or a step's reward against a baseline.

Two functions serve a critic: `prompt_noise_weights` says how noisy its targets are, and
`measured_targets` what continuations of a state earned. Groups are contiguous rows. Nothing here is
differentiated. REINFORCE++'s advantages are per token and need no baseline: they are
`advantages.monte_carlo_returns`, whitened.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.functional.masking import Reduce, identity, zero_outside

_STD_EPS = 1e-6  # added to the std of a group (GRPO)
_VARIANCE_EPS = 1e-8  # keeps the scaling of a batch without contrast finite


@torch.no_grad()
def group_relative_advantages(
    rewards: Float[Tensor, " B"], *, group_size: int
) -> Float[Tensor, " B"]:
    """Score each response against the other responses to its prompt (GRPO, DAPO).

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)        std unbiased, over the group

    Source: GRPO (arXiv 2402.03300) 4.1. Groups are contiguous. A group of equal rewards gives
    exactly 0.
    Units: group standard deviations.
    Raises: ValueError when group_size < 2 or it does not divide the number of rewards.

    >>> group_relative_advantages(torch.tensor([1.0, 3.0, 7.0, 7.0]), group_size=2)
    tensor([-0.7071,  0.7071,  0.0000,  0.0000])
    """
    centered = _centered_in_group(rewards, group_size)
    std = rewards.view(-1, group_size).std(dim=1, keepdim=True, correction=1)
    return (centered / (std + _STD_EPS)).flatten()


@torch.no_grad()
def leave_one_out_advantages(
    rewards: Float[Tensor, " B"], *, group_size: int
) -> Float[Tensor, " B"]:
    """Score each response against the mean of the other G - 1 of its group (RLOO).

        A_i = r_i - mean_{j != i} r_j = (r_i - mean(r)) * G / (G - 1)

    Source: RLOO (arXiv 2402.14740). Groups are contiguous. A group of equal rewards gives
    exactly 0.
    Units: those of the reward.
    Raises: ValueError when group_size < 2 or it does not divide the number of rewards.

    >>> leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0]), group_size=3)
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    centered = _centered_in_group(rewards, group_size)
    return (centered * (group_size / (group_size - 1))).flatten()


@torch.no_grad()
def mean_of_others(x: Float[Tensor, " B"], *, group_size: int) -> Float[Tensor, " B"]:
    """Return the mean of x over the other G - 1 responses of each response's group.

    Groups are contiguous.
    Units: those of x.
    Raises: ValueError when group_size < 2 or it does not divide the number of responses.

    >>> mean_of_others(torch.tensor([3.0, 1.0]), group_size=2)
    tensor([1., 3.])
    """
    return x - leave_one_out_advantages(x, group_size=group_size)


@torch.no_grad()
def group_mean_advantages(rewards: Float[Tensor, " B"], *, group_size: int) -> Float[Tensor, " B"]:
    """Score each response against its group's mean, unscaled (Dr.GRPO).

        A_i = r_i - mean(r)

    Source: Dr.GRPO (arXiv 2503.20783): dividing by the group's std would weigh prompts that
    are nearly solved, or nearly hopeless, more. A group of equal rewards gives exactly 0.
    Units: those of the reward.
    Raises: ValueError when group_size < 2 or it does not divide the number of rewards.

    >>> group_mean_advantages(torch.tensor([1.0, 3.0, 7.0, 7.0]), group_size=2)
    tensor([-1.,  1.,  0.,  0.])
    """
    return _centered_in_group(rewards, group_size).flatten()


@torch.no_grad()
def whitened_group_mean_advantages(
    rewards: Float[Tensor, " B"],
    *,
    group_size: int,
    counted: Bool[Tensor, " B"] | None = None,
    reduce: Reduce = identity,
) -> Float[Tensor, " B"]:
    """Center rewards in their group, then scale to variance 1 in the batch (REINFORCE++-baseline).

        a_i = r_i - mean(r)                            mean over the group
        A_i = a_i / sqrt(sum_j a_j^2 / N + 1e-8)       j over the N counted responses, all ranks

    counted: which responses the variance is over, namely those that are not fillers; None: all.

    Source: REINFORCE++ (arXiv 2501.03262), the variant with a group baseline. The batch mean
    of a is 0, as every group's is, so whitening has no mean to subtract. Deviation: each
    response counts once in the moments, whatever its length. Weighted by tokens the mean would
    not be 0, and a group of equal rewards would get an advantage. Here it gets exactly 0.
    Units: standard deviations of the batch.
    Raises: ValueError when group_size < 2 or it does not divide the number of rewards.

    >>> whitened_group_mean_advantages(torch.tensor([1.0, 3.0, 7.0, 7.0]), group_size=2)
    tensor([-1.4142,  1.4142,  0.0000,  0.0000])
    """
    return _scaled_to_one(_centered_in_group(rewards, group_size).flatten(), counted, reduce)


@torch.no_grad()
def group_relative_apart_advantages(
    verifier_rewards: Float[Tensor, "B R"],
    weights: Float[Tensor, " R"],
    *,
    group_size: int,
    counted: Bool[Tensor, " B"] | None = None,
    reduce: Reduce = identity,
) -> Float[Tensor, " B"]:
    """Normalize each verifier's rewards in their group, then sum over verifiers and scale (GDPO).

        a_i = sum_k w_k (r_ik - mean(r_k)) / (std(r_k) + 1e-6)      std unbiased, over the group
        A_i = a_i / sqrt(sum_j a_j^2 / N + 1e-8)                    j over the N counted responses

    Summed before they are normalized, rewards (1, 0) and (0, 1) of two verifiers would be one
    number, and a group of such responses would teach nothing. The batch's mean of a is 0, as every
    group's is.

    R is the number of verifiers.
    counted: which responses the variance is over, namely those that are not fillers; None: all.

    Source: GDPO (arXiv 2601.05242). Deviation: the batch's standard deviation divides by N, and
    its epsilon is under the root.
    Units: standard deviations of the batch.
    Raises: ValueError when group_size < 2 or it does not divide the number of responses.

    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    >>> group_relative_apart_advantages(rewards, torch.tensor([1.0, 0.5]), group_size=2)
    tensor([ 0.6325, -0.6325,  1.2649, -1.2649])
    """
    columns = [group_relative_advantages(r, group_size=group_size) for r in verifier_rewards.T]
    summed = torch.stack(columns, dim=1) @ weights.to(verifier_rewards.dtype)
    return _scaled_to_one(summed, counted, reduce)


def _scaled_to_one(
    centered: Float[Tensor, " B"], counted: Bool[Tensor, " B"] | None, reduce: Reduce
) -> Float[Tensor, " B"]:
    """Divide centered numbers by their root mean square over the `counted` rows of all ranks.

    If `counted` is None, all rows count.
    """
    squares = centered.double().square()
    weights = torch.ones_like(squares) if counted is None else counted.to(squares.dtype)
    total, count = reduce(torch.stack([(weights * squares).sum(), weights.sum()]))
    return (centered * (total / count.clamp(min=1) + _VARIANCE_EPS).rsqrt()).to(centered.dtype)


@torch.no_grad()
def greedy_baseline_advantages(
    rewards: Float[Tensor, " B"], baseline_rewards: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Score each response against the greedy response to the same prompt (ReMax).

        A_i = r_i - r(greedy response)

    Source: ReMax (arXiv 2310.10505). No group is needed.
    Units: those of the reward.

    >>> greedy_baseline_advantages(torch.tensor([1.0, -1.0]), torch.tensor([-1.0, -1.0]))
    tensor([2., 0.])
    """
    return rewards - baseline_rewards


@torch.no_grad()
def step_advantages(
    token_rewards: Float[Tensor, "B T"],
    step_values: Float[Tensor, "B T"],
    step_starts: Bool[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Score each step by how far it changes the expected reward (VinePPO).

        A_t = sum of r_u + V(s_{k+1}) - V(s_k)     u: the tokens of step k, the step of token t

    V(s_k) is the value before the first token of step k, and 0 after the last step, so that the
    last step has the response's reward less its own value.

    Source: VinePPO (arXiv 2410.01679), with gamma 1. `step_values` is read on the first token of
    each step only.
    Units: those of the reward; the advantages of a response's steps add up to R - V(s_0).
    Padding: may hold anything and comes back as 0; the mask may have gaps.
    Raises: ValueError when the first sampled token of a row starts no step.

    >>> starts = torch.tensor([[True, False, True]])
    >>> r, v = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.5, 0.75]])
    >>> step_advantages(r, v, starts, torch.ones_like(starts))
    tensor([[0.2500, 0.2500, 0.2500]])
    """
    starts = step_starts & response_mask
    numbers = starts.cumsum(dim=1) - 1
    if bool(((numbers < 0) & response_mask).any()):
        raise ValueError("a response's first token must start a step")
    numbers = numbers.clamp(min=0)  # columns before a row's first token, which add nothing
    per_step = torch.zeros(len(starts), starts.shape[1] + 1, dtype=torch.double).to(starts.device)
    rewards = per_step.scatter_add(1, numbers, zero_outside(token_rewards, response_mask).double())
    values = per_step.scatter_add(1, numbers, zero_outside(step_values, starts).double())
    changes = rewards[:, :-1] + values[:, 1:] - values[:, :-1]
    dtype = torch.promote_types(token_rewards.dtype, step_values.dtype)
    return zero_outside(changes.gather(1, numbers), response_mask).to(dtype)


@torch.no_grad()
def correct_only_advantages(is_correct: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Give correct responses the advantage 1 and wrong ones 0; the caller drops the wrong (RAFT).

        A_i = 1 if correct, else dropped

    Source: RAFT (arXiv 2304.06767) with a verifier: fine-tuning on the accepted responses.

    >>> correct_only_advantages(torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return is_correct.float()


@torch.no_grad()
def prompt_noise_weights(
    rewards: Float[Tensor, " B"],
    *,
    group_size: int,
    reward_range: tuple[float | int, float | int],
    reduce: Reduce = identity,
) -> Float[Tensor, " B"]:
    """Return weights of the responses' value losses, larger where a prompt's rewards vary less.

        u(s) = 1 / max(std(r), (high - low) / (2 sqrt(G)))     population std over the group
        w(s) = u(s) / mean of u                                over the prompts of all ranks

    Source: EasyPPO (arXiv 2609.36802). Give it the whole rollout batch, truncated responses
    included, before it is cut into minibatches. EasyPPO's code differs: it takes
    1 / max(sqrt(variance), 0.25), and does not divide by the mean. Groups are contiguous.
    Units: none; 1 on average over prompts.
    Raises: ValueError when group_size < 2 or it does not divide the number of rewards, or when
    reward_range is not finite or its low is not below its high.

    >>> prompt_noise_weights(torch.tensor([1.0, 0, 1, 1]), group_size=2, reward_range=(0, 1))
    tensor([0.8284, 0.8284, 1.1716, 1.1716])
    """
    low, high = reward_range
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"reward_range must be finite and ascend, got {low} to {high}")
    std = _groups(rewards.double(), group_size).std(dim=1, correction=0)
    u = 1.0 / std.clamp(min=(high - low) / (2 * math.sqrt(group_size)))
    total, count = reduce(torch.stack([u.sum(), u.new_tensor(float(len(u)))]))
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return (u * count / total).repeat_interleave(group_size).to(dtype)


@torch.no_grad()
def measured_targets(
    returns: Float[Tensor, "B T"],
    measured_values: Float[Tensor, "B T"],
    measured_draws: Float[Tensor, "B T"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Average each token's return with the mean of `measured_draws` continuations from its state.

        n_t = 1 + k_t                        k_t continuations, of mean return M_t
        y_t = (R_t + k_t * M_t) / n_t

    Returns: the value targets y_t, and n_t, the number of returns in each, which is its weight in
    the value loss.

    The response's return R_t is one more independent draw of V(s_t), so y_t has 1/n_t of its
    variance. n_t (V - y_t)^2 is, but for a constant, the sum of (V - draw)^2 over the draws: its
    gradient is that of n_t responses which share the state. Weights by the variance observed among
    the draws would bias the critic towards 0 and 1: four draws, each 1 with p = 0.2 and else 0, are
    all 0 with probability 0.41 and all 1 with 0.0016. Both show variance 0, so they would get all
    the weight, and the mean over them is 0.0016 / 0.4112 = 0.004 instead of 0.2.

    Source: this repository (docs/rollout_files.md).
    Units: those of the reward. k_t is a number of returns, which need not be whole where several
    responses share continuations.
    Padding: where k_t is 0 the results are the return, bit for bit, and 1.

    >>> r, mean, draws = torch.ones(1, 2), torch.tensor([[0.0, 0.5]]), torch.tensor([[0.0, 4.0]])
    >>> measured_targets(r, mean, draws)
    (tensor([[1.0000, 0.6000]]), tensor([[1., 5.]]))
    """
    num = 1 + measured_draws
    pooled = (returns + measured_draws * measured_values) / num
    return torch.where(measured_draws > 0, pooled, returns), num


def _groups(rewards: Tensor, group_size: int) -> Tensor:
    if group_size < 2:
        raise ValueError(f"a group baseline needs group_size >= 2, got {group_size}")
    if rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} rewards are not groups of {group_size}")
    return rewards.view(-1, group_size)


def _centered_in_group(rewards: Tensor, group_size: int) -> Tensor:
    groups = _groups(rewards, group_size)
    # The float mean of equal numbers need not be that number, and 1e-8 / 1e-6 is not nothing.
    all_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    return torch.where(all_equal, 0.0, groups - groups.mean(dim=1, keepdim=True))
