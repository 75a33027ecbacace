"""Masks of tokens: select and count tokens, and close up rows with gaps.

A masked-out entry may hold anything, NaN and inf included. So nothing here multiplies by a
mask (0 * NaN is NaN); `torch.where` selects, and its backward gives such entries gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LossReduction = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]
Reduce = Callable[[Tensor], Tensor]
"""Adds a tensor up over the ranks; `identity` when there is one rank."""


def identity(sums: Tensor) -> Tensor:
    """Return the sums unchanged: the `reduce` of a run with a single rank."""
    return sums


def zero_outside(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Keep x where the mask is True and put 0 elsewhere, in the backward too.

    >>> zero_outside(torch.tensor([[2.0, float("nan")]]), torch.tensor([[True, False]]))
    tensor([[2., 0.]])
    """
    return torch.where(mask, x, 0.0)


def response_means(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Return the mean of each row's True tokens; 0 where there is none.

    >>> response_means(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([2.])
    """
    return zero_outside(x, mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def loss_denominator(mask: Bool[Tensor, "B T"], *, reduction: LossReduction) -> Int[Tensor, ""]:
    """Return the denominator of `losses.aggregate` for these rows.

    It is the number of tokens for `token_mean`, else the number of responses that have a token.

    A row without a single True token (overlong filtering, a filler row) is not counted, just
    as its tokens are not. Add these counts up over micro-batches and ranks to get the
    denominator of a minibatch.
    Raises: ValueError for `constant_length`, whose limit of the response length is not in the mask.
    """
    if reduction == "constant_length":
        raise ValueError("constant_length needs its denominator: responses * max_response_tokens")
    return mask.sum() if reduction == "token_mean" else mask.any(dim=1).sum()


def place_at_last_token(
    rewards: Float[Tensor, " B"], response_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Put each response's reward on its last sampled token, and 0 on every other token.

    Source: VAPO 2.1 (the verifier scores the whole response, at its end).
    Padding: 0. A row without tokens keeps no reward.

    >>> place_at_last_token(torch.tensor([1.0]), torch.tensor([[True, True, False]]))
    tensor([[0., 1., 0.]])
    """
    later = response_mask.flip(1).cumsum(dim=1).flip(1)
    return torch.where(response_mask & (later == 1), rewards[:, None], 0.0)


def last_column(mask: Bool[Tensor, "B T"]) -> Int[Tensor, " B"]:
    """Return the column of each row's last True token; 0 where there is none.

    >>> last_column(torch.tensor([[True, False, True, False]]))
    tensor([2])
    """
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, columns, 0).amax(dim=1)


def first_tokens(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Mark each row's first True token alone.

    >>> first_tokens(torch.tensor([[False, True, True, False, True]]))
    tensor([[False,  True, False, False, False]])
    """
    return mask & (mask.cumsum(dim=1) == 1)


def first_column(mask: Bool[Tensor, "B T"]) -> Int[Tensor, " B"]:
    """Return the column of each row's first True token; 0 where there is none.

    >>> first_column(torch.tensor([[False, True, True, False]]))
    tensor([1])
    """
    return mask.int().argmax(dim=1)


def check_rewards_on_sampled(
    token_rewards: Float[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]
) -> None:
    """Check that all rewards are on sampled tokens. GAE would silently drop any other reward.

    Raises: ValueError: a reward is on a token that the policy did not sample.
    """
    is_bad = (token_rewards != 0) & ~response_mask
    if bool(is_bad.any()):
        row, column = is_bad.nonzero()[0].tolist()
        raise ValueError(
            f"{int(is_bad.sum())} rewards are on tokens that the policy did not sample; the first "
            f"is {float(token_rewards[row, column])} on token {column} of row {row}"
        )


@torch.no_grad()
def lowest_share_mask(
    spread: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, share: float | int
) -> Bool[Tensor, "B T"]:
    """Mark the given share of the True tokens, those on which several critics differ least.

        True where spread_t < the (floor(share * n) + 1)-th smallest spread, n True tokens

    Source: AsyPPO (arXiv 2510.01656): the spread is the standard deviation over critics, and the
    tokens of least spread lose their policy loss. Given -spread, this marks the tokens of largest
    spread, which lose the entropy bonus. The source states neither the share nor its rounding.
    Tokens that tie at the bound are not marked, so that the order of rows does not matter, and no
    token is marked if the critics agree everywhere.
    Padding: ignored, and False in the result.
    Raises: ValueError when share is not in [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"share must be in [0, 1), got {share}")
    spreads = spread[mask].sort().values
    if not len(spreads):
        return torch.zeros_like(mask)
    return mask & (spread < spreads[int(share * len(spreads))])


def is_left_aligned(mask: Bool[Tensor, "B T"]) -> bool:
    """Whether in every row all True tokens come first: no gap, no left padding."""
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def compaction_index(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Return the column to which `compact` moves each token: True tokens are counted from 0.

    A False token gets the column T, which `compact` discards.
    """
    return torch.where(mask, mask.cumsum(dim=1) - 1, mask.shape[1])


def compact(x: Float[Tensor, "B T"], index: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Move the True tokens of each row to the left, in order, and fill the row up with 0.

    `index` is the `compaction_index` of the mask.
    """
    num_rows, num_columns = x.shape
    return x.new_zeros(num_rows, num_columns + 1).scatter_(1, index, x)[:, :num_columns]


def scatter_back(x: Float[Tensor, "B T"], index: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Undo `compact` with the same `index`: move True tokens back to their columns, 0 elsewhere."""
    return torch.nn.functional.pad(x, (0, 1)).gather(1, index)
