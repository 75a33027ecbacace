"""Advantages and value targets of whole turns: a turn of an episode is one action.

Nothing here is differentiated.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.functional.advantages import decoupled_gae
from vapo.functional.masking import compact, compaction_index, zero_outside


@torch.no_grad()
def decoupled_turn_gae(
    token_rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    turn_starts: Bool[Tensor, "B T"],
    *,
    gamma: float | int,
    lambda_policy: float | int | Float[Tensor, "B 1"],
    lambda_critic: float | int | Float[Tensor, "B 1"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Estimate one advantage and one value target a turn, with a lambda for each.

        r_k     = sum over the turn's sampled tokens of their rewards
        V_k     = V at the turn's first sampled token
        delta_k = r_k + gamma * V_{k+1} - V_k
        A_k     = delta_k + gamma * lambda_policy * A_{k+1}
        R_k     = A_k with lambda_critic, plus V_k

    Every sampled token of turn k has A_k; R_k stands on the turn's first sampled token alone.
    V and A after the last turn are 0. Turns of one token each give `decoupled_gae`.
    Source: Turn-PPO (arXiv 2512.17008), whose ratio of a whole turn is left to the surrogate;
    decoupled lambdas as `decoupled_gae` (VAPO 4.1), with its Monte-Carlo targets at
    lambda_critic = 1.
    Units: those of the reward; gamma and the lambdas are per turn.
    Padding: both results are 0 on tokens that were not sampled. They may hold anything, and so may
    the values of all tokens but a turn's first.
    Raises: ValueError when gamma or a lambda is outside [0, 1], a turn starts on a token that was
    not sampled, or a token was sampled before the first turn.

    >>> r, v = torch.tensor([[0.0, 0.5, 9.0, 1.0]]), torch.tensor([[0.25, 9.0, 9.0, 0.5]])
    >>> sampled = torch.tensor([[True, True, False, True]])
    >>> starts = torch.tensor([[True, False, False, True]])
    >>> decoupled_turn_gae(r, v, sampled, starts, gamma=1.0, lambda_policy=0.5, lambda_critic=1.0)
    (tensor([[1.0000, 1.0000, 0.0000, 0.5000]]), tensor([[1.5000, 0.0000, 0.0000, 1.0000]]))
    """
    dtype = torch.promote_types(token_rewards.dtype, values.dtype)
    numbers = turn_numbers(response_mask, turn_starts)
    rewards = zero_outside(token_rewards, response_mask).double()
    turn_rewards = torch.zeros_like(rewards).scatter_add(1, numbers.clamp(min=0), rewards)
    is_turn = torch.arange(numbers.shape[1], device=numbers.device) <= numbers.amax(1, keepdim=True)
    turn_results = decoupled_gae(
        turn_rewards,
        compact(values.double(), compaction_index(turn_starts)),
        is_turn,
        gamma=gamma,
        lambda_policy=lambda_policy,
        lambda_critic=lambda_critic,
    )
    advantages, targets = (x.gather(1, numbers.clamp(min=0)).to(dtype) for x in turn_results)
    return zero_outside(advantages, response_mask), zero_outside(targets, turn_starts)


def turn_numbers(
    response_mask: Bool[Tensor, "B T"], turn_starts: Bool[Tensor, "B T"]
) -> Int[Tensor, "B T"]:
    """Return for each sampled token the number of its turn in the row, from 0; else -1.

    Raises: ValueError where a turn starts on a token that was not sampled, or a token was sampled
    before the first turn.

    >>> sampled = torch.tensor([[False, True, True, False, True]])
    >>> starts = torch.tensor([[False, True, False, False, True]])
    >>> turn_numbers(sampled, starts)
    tensor([[-1,  0,  0, -1,  1]])
    """
    numbers = torch.where(response_mask, turn_starts.cumsum(dim=1) - 1, -1)
    for is_bad, problem in (
        (turn_starts & ~response_mask, "a turn starts on a token that was not sampled"),
        (response_mask & (numbers < 0), "a sampled token comes before the first turn"),
    ):
        if bool(is_bad.any()):
            row, column = is_bad.nonzero()[0].tolist()
            raise ValueError(f"{problem}: token {column} of row {row}")
    return numbers


def on_whole_turns(
    x: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    turn_starts: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Return for every sampled token the entry of x at its turn's first token; else 0.

    >>> x = torch.tensor([[7.0, 2.0, 7.0, 3.0]])
    >>> sampled = torch.tensor([[False, True, True, True]])
    >>> on_whole_turns(x, sampled, torch.tensor([[False, True, False, True]]))
    tensor([[0., 2., 2., 3.]])
    """
    numbers = turn_numbers(response_mask, turn_starts).clamp(min=0)
    return zero_outside(compact(x, compaction_index(turn_starts)).gather(1, numbers), response_mask)
