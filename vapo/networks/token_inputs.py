"""Make network inputs from sequences: padded to a rectangle, or packed into one row.

Both layouts give the same states at the same tokens; which one is faster depends on the device
and on how unequal the lengths are (`vapo.networks.packed_attention` chooses).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.system.distributed import max_over_ranks
from vapo.types import Prompt, RolloutBatch

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class TokenInputs:
    """The network inputs of `b` pairs of prompt and response.

    Padded: a row for each, right-padded. Packed: one row of all of them, in which positions are
    counted from 0 in each and attention is confined to each (`sequence_lengths`).

    `state_rows`, `state_columns` place the hidden state that precedes the i-th response token
    (`targets[i]`); tokens are in row-major order of `response_mask`.
    """

    input_ids: Int[Tensor, "rows S"]
    sequence_lengths: tuple[int, ...]
    is_packed: bool
    response_mask: Bool[Tensor, "b T"]
    state_rows: Int[Tensor, " n"]
    state_columns: Int[Tensor, " n"]
    targets: Int[Tensor, " n"]

    def scatter(self, flat: Float[Tensor, " n *K"]) -> Float[Tensor, "b T *K"]:
        """Put token values back in response alignment, 0 where there is no token."""
        mask, more = self.response_mask, flat.shape[1:]
        zeros = flat.new_zeros(*mask.shape, *more)
        if more:  # the K logits of a token lie together
            mask = mask.reshape(*mask.shape, *[1] * len(more)).expand_as(zeros)
        return zeros.masked_scatter(mask, flat)

    def to(self, device: torch.device) -> TokenInputs:
        tensors: dict[str, Any] = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)


def token_inputs(
    sequences: Sequences,
    *,
    pad_id: int,
    packed: bool = False,
    response_mask: Bool[Tensor, "b T"] | None = None,
) -> TokenInputs:
    """Make the network inputs of (prompt ids, response ids) pairs.

    Args:
        response_mask: the response tokens to evaluate; default all of them.
    """
    lengths = torch.tensor([[len(prompt), len(response)] for prompt, response in sequences])
    totals = lengths.sum(dim=1)
    flat_ids = torch.tensor([i for prompt, response in sequences for i in (*prompt, *response)])
    if response_mask is None:
        response_mask = torch.arange(int(lengths[:, 1].max())) < lengths[:, 1:]
    state_rows, response_columns = response_mask.nonzero(as_tuple=True)
    state_columns = lengths[state_rows, 0] + response_columns - 1
    if packed:
        input_ids = flat_ids[None]
        state_columns = (totals.cumsum(0) - totals)[state_rows] + state_columns
        state_rows = torch.zeros_like(state_rows)
    else:
        is_token = torch.arange(int(totals.max())) < totals[:, None]
        input_ids = torch.full(is_token.shape, pad_id, dtype=torch.long)
        input_ids[is_token] = flat_ids
    return TokenInputs(
        input_ids=input_ids,
        sequence_lengths=tuple(totals.tolist()),
        is_packed=packed,
        response_mask=response_mask,
        state_rows=state_rows,
        state_columns=state_columns,
        targets=input_ids[state_rows, state_columns + 1],
    )


def end_inputs(sequences: Sequences, *, pad_id: int) -> TokenInputs:
    """Make padded inputs with one hidden state a row: the one after its last token."""
    inputs = token_inputs(sequences, pad_id=pad_id)
    num_rows = len(sequences)
    return replace(
        inputs,
        response_mask=torch.ones((num_rows, 1), dtype=torch.bool),
        state_rows=torch.arange(num_rows),
        state_columns=torch.tensor(inputs.sequence_lengths) - 1,
        targets=torch.zeros(num_rows, dtype=torch.long),
    )


def cut_by_tokens(
    lengths: Sequence[int], rows: Sequence[int], *, max_tokens: int, packed: bool = False
) -> list[list[int]]:
    """Cut rows into chunks of at most `max_tokens` tokens: with padding, or packed without.

    `lengths[row]` is the row's prompt + response length; a row longer than the budget gets a
    chunk of its own. All ranks get equally many chunks, since every forward of a sharded network
    is a collective, and each rank's largest come first, so that ranks wait little for each other.
    Padded, rows of similar length go together; packed, the chunks are about equally large.
    """
    cut = _packed_chunks if packed else _padded_chunks
    chunks = cut(lengths, rows, max_tokens)
    wanted = int(max_over_ranks(torch.tensor(len(chunks))))
    while len(chunks) < wanted:
        largest = max((c for c in chunks if len(c) > 1), key=lambda c: _num_tokens(lengths, c))
        chunks.remove(largest)
        chunks += [largest[::2], largest[1::2]] if packed else _halves(largest)
    return sorted(chunks, key=lambda chunk: _num_tokens(lengths, chunk), reverse=True)


def _num_tokens(lengths: Sequence[int], chunk: Sequence[int]) -> int:
    return sum(lengths[row] for row in chunk)


def _halves(chunk: list[int]) -> list[list[int]]:
    half = len(chunk) // 2
    return [chunk[:half], chunk[half:]]


def _padded_chunks(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    chunks: list[list[int]] = []
    for row in sorted(rows, key=lambda row: lengths[row], reverse=True):
        width = lengths[chunks[-1][0]] if chunks else 0
        if chunks and width * (len(chunks[-1]) + 1) <= max_tokens:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def _packed_chunks(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The fewest chunks into which "longest row first, into the emptiest chunk" fits."""
    longest_first = sorted(rows, key=lambda row: lengths[row], reverse=True)
    num_chunks = max(1, -(-_num_tokens(lengths, rows) // max_tokens))
    while True:
        chunks: list[list[int]] = [[] for _ in range(num_chunks)]
        loads = [(0, index) for index in range(num_chunks)]
        for row in longest_first:
            load, index = heapq.heappop(loads)
            chunks[index].append(row)
            heapq.heappush(loads, (load + lengths[row], index))
        if all(len(chunks[i]) < 2 or load <= max_tokens for load, i in loads):
            return [chunk for chunk in chunks if chunk]
        num_chunks += 1


def rollout_inputs(
    batch: RolloutBatch,
    rows: Sequence[int],
    *,
    pad_id: int,
    packed: bool = False,
    for_critic: bool = False,
) -> TokenInputs:
    """Make the network inputs of some rows of a rollout batch, cut to their longest response.

    Args:
        for_critic: behind the prompts that the critic reads; never those of another network.
    """
    rollouts = [batch.rollouts[row] for row in rows]
    longest = max(1, *(len(rollout.response_ids) for rollout in rollouts))
    return token_inputs(
        [
            (critic_prompt(r.prompt) if for_critic else r.prompt.prompt_ids, r.response_ids)
            for r in rollouts
        ],
        pad_id=pad_id,
        packed=packed,
        response_mask=batch.response_mask[list(rows), :longest],
    )


def sequence_lengths(batch: RolloutBatch, *, for_critic: bool = False) -> list[int]:
    """Prompt + response length of every row, in tokens."""
    return [
        len(critic_prompt(r.prompt) if for_critic else r.prompt.prompt_ids) + len(r.response_ids)
        for r in batch.rollouts
    ]


def critic_prompt(prompt: Prompt) -> tuple[int, ...]:
    """What the critic reads before a response."""
    return prompt.prompt_ids if prompt.critic_prompt_ids is None else prompt.critic_prompt_ids


def has_critic_prompts(batch: RolloutBatch) -> bool:
    """Whether the critic reads other prompts than the policy."""
    return any(rollout.prompt.critic_prompt_ids is not None for rollout in batch.rollouts)
