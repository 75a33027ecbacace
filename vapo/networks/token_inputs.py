"""Make network inputs from sequences: padded to a rectangle, or packed into one row.

All layouts give the same states at the same tokens; which one is faster depends on the device
and on how unequal the lengths are (`vapo.networks.layouts` chooses).

    padded            a row for each sequence, right-padded
    packed            one row of all sequences, one after another
    shared_prompts    the same row, in which a prompt of several responses stands once: prompt A,
                      its responses, prompt B, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vapo.functional.columns import on_device
from vapo.networks.repeated_rows import RepeatedRows
from vapo.types import Prompt, RolloutBatch

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
Layout = Literal["padded", "packed", "shared_prompts"]
# Queries of a layer with a window are cut into blocks as long as the window, at least this long. So
# a block computes few keys that its queries do not need, and there are few calls.
_MIN_BLOCK = 256


class Segment(NamedTuple):
    """Neighbouring tokens that attend causally to one another, and to all of a shared prompt.

    A segment that is a whole sequence contains its prompt, and has `prompt_length` 0.
    `prompt_start` is the column in the packed row at which the shared prompt begins.
    """

    length: int
    prompt_start: int = 0
    prompt_length: int = 0


@dataclass(frozen=True)
class TokenInputs:
    """The network inputs of `b` pairs of prompt and response.

    Padded: each pair has a row, which is one segment. Packed: one row has all segments. Positions
    are then counted from 0 in each segment, or from the end of the prompt that it continues, and
    attention is confined to the segment and that prompt.

    `state_rows`, `state_columns` are the row and column of the hidden state that precedes the i-th
    response token (`targets[i]`); tokens are in row-major order of `response_mask`. The state of a
    shared prompt's last token precedes the first token of each of its responses.
    `sampled_logprobs` are the log-probs of the rollouts, which a value head may read; None: the
    tokens were not sampled. `actor_states` are the actor's states before the targets, for a critic
    without a network; None for all others.
    """

    input_ids: Int[Tensor, "rows S"]
    segments: tuple[Segment, ...]
    is_packed: bool
    response_mask: Bool[Tensor, "b T"]
    state_rows: Int[Tensor, " n"]
    state_columns: Int[Tensor, " n"]
    targets: Int[Tensor, " n"]
    sampled_logprobs: Float[Tensor, "b T"] | None = None
    actor_states: Float[Tensor, "n L H"] | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens that go through the network, without padding."""
        return sum(segment.length for segment in self.segments)

    def scatter(self, flat: Float[Tensor, " n *K"]) -> Float[Tensor, "b T *K"]:
        """Put one value for each response token into rows of responses; other entries are 0."""
        mask, trailing = self.response_mask, flat.shape[1:]
        zeros = flat.new_zeros(*mask.shape, *trailing)
        if trailing:  # the K logits of a token lie together
            mask = mask.reshape(*mask.shape, *[1] * len(trailing)).expand_as(zeros)
        return zeros.masked_scatter(mask, flat)

    def to(self, device: torch.device) -> TokenInputs:
        tensors: dict[str, Any] = {
            f.name: on_device(value, device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)


def token_inputs(
    sequences: Sequences,
    *,
    pad_id: int,
    layout: Layout = "padded",
    response_mask: Bool[Tensor, "b T"] | None = None,
) -> TokenInputs:
    """Make the network inputs of (prompt ids, response ids) pairs.

    Args:
        pad_id: the token that fills rows of the padded layout.
        response_mask: the response tokens to evaluate; default all of them.
    """
    if response_mask is None:
        lengths = torch.tensor([len(response) for _, response in sequences])
        response_mask = torch.arange(int(lengths.max())) < lengths[:, None]
    token_rows = (
        _padded(sequences, pad_id)
        if layout == "padded"
        else _packed(sequences, shares_prompts=layout == "shared_prompts")
    )
    rows, columns = response_mask.nonzero(as_tuple=True)
    first_states, first_tokens = torch.tensor(token_rows.responses).unbind(dim=1)
    target_columns = first_tokens[rows] + columns
    state_rows = torch.zeros_like(rows) if layout != "padded" else rows
    return TokenInputs(
        input_ids=token_rows.input_ids,
        segments=tuple(token_rows.segments),
        is_packed=layout != "padded",
        response_mask=response_mask,
        state_rows=state_rows,
        state_columns=torch.where(columns == 0, first_states[rows], target_columns - 1),
        targets=token_rows.input_ids[state_rows, target_columns],
    )


class _TokenRows(NamedTuple):
    """Tokens laid out in rows.

    `responses` has for each pair the columns of its last prompt token and first response token.
    """

    input_ids: Int[Tensor, "rows S"]
    segments: list[Segment]
    responses: list[tuple[int, int]]


def _padded(sequences: Sequences, pad_id: int) -> _TokenRows:
    totals = torch.tensor([len(prompt) + len(response) for prompt, response in sequences])
    is_token = torch.arange(int(totals.max())) < totals[:, None]
    input_ids = torch.full(is_token.shape, pad_id, dtype=torch.long)
    input_ids[is_token] = torch.tensor([i for pair in sequences for ids in pair for i in ids])
    return _TokenRows(
        input_ids,
        [Segment(total) for total in totals.tolist()],
        [(len(prompt) - 1, len(prompt)) for prompt, _ in sequences],
    )


def _packed(sequences: Sequences, *, shares_prompts: bool) -> _TokenRows:
    """Put all pairs of prompt and response into one row.

    If `shares_prompts`, pairs of one prompt are neighbours, behind one copy of the prompt.
    """
    groups: dict[Any, list[int]] = {}
    for index, (prompt, _) in enumerate(sequences):
        groups.setdefault(tuple(prompt) if shares_prompts else index, []).append(index)
    ids: list[int] = []
    segments: list[Segment] = []
    responses: dict[int, tuple[int, int]] = {}
    for members in groups.values():
        prompt_start, prompt = len(ids), sequences[members[0]][0]
        ids += prompt
        last = len(ids) - 1
        if len(members) > 1:
            segments.append(Segment(len(prompt)))
        for index in members:
            response = sequences[index][1]
            responses[index] = (last, len(ids))
            ids += response
            if len(members) == 1:
                segments.append(Segment(len(prompt) + len(response)))
            elif len(response) > 0:
                segments.append(Segment(len(response), prompt_start, len(prompt)))
    return _TokenRows(
        torch.tensor([ids]), segments, [responses[index] for index in range(len(sequences))]
    )


def rollout_inputs(
    batch: RolloutBatch,
    rows: Sequence[int],
    *,
    pad_id: int,
    layout: Layout = "padded",
    for_critic: bool = False,
) -> TokenInputs:
    """Make the network inputs of some rows of a rollout batch, cut to their longest response.

    Args:
        for_critic: whether to use the prompts that the critic reads, and the actor's states if
            the batch has them. Inputs of other networks never have these states.
    """
    rollouts = [batch.rollouts[row] for row in rows]
    longest = max(1, *(len(rollout.response_ids) for rollout in rollouts))
    inputs = token_inputs(
        [
            (critic_prompt(r.prompt) if for_critic else r.prompt.prompt_ids, r.response_ids)
            for r in rollouts
        ],
        pad_id=pad_id,
        layout=layout,
        response_mask=batch.response_mask[list(rows), :longest],
    )
    states = batch.actor_states if for_critic else None
    return replace(
        inputs,
        sampled_logprobs=batch.rollout_logprobs[list(rows), :longest],
        actor_states=None if states is None else torch.cat([states[row] for row in rows]),
    )


def critic_prompt(prompt: Prompt) -> tuple[int, ...]:
    """Return the prompt ids that the critic reads before a response."""
    return prompt.prompt_ids if prompt.critic_prompt_ids is None else prompt.critic_prompt_ids


def has_critic_prompts(batch: RolloutBatch) -> bool:
    """Whether the critic reads other prompts than the policy."""
    return any(rollout.prompt.critic_prompt_ids is not None for rollout in batch.rollouts)


# ---- packed rows ----------------------------------------------------------------------------


class PackedRow:
    """What attention reads about a packed row: where its segments end, their keys, and masks.

    All layers share one object. A window is the number of tokens that a layer attends to, including
    the query's own token. None stands for all tokens.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = segments
        self.device = device
        self.max_queries = max(s.length for s in segments)
        self.max_keys = max(s.prompt_length + s.length for s in segments)
        self._masks: dict[Any, Tensor] = {}

    @cached_property
    def query_ends(self) -> Int[Tensor, " bounds"]:
        return self._ends([s.length for s in self.segments])

    @cached_property
    def key_ends(self) -> Int[Tensor, " bounds"]:
        return self._ends([s.prompt_length + s.length for s in self.segments])

    def _ends(self, lengths: list[int]) -> Tensor:
        return on_device(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), self.device)

    @cached_property
    def keys(self) -> RepeatedRows | None:
        """The index that reads the row's keys, one segment after another.

        It repeats a shared prompt's keys before those of each of its responses. None: no segment
        has a shared prompt, so the keys are read as they are.
        """
        if not any(s.prompt_length for s in self.segments):
            return None
        places = []
        start = 0
        for length, prompt_start, prompt_length in self.segments:
            places.append(np.arange(prompt_start, prompt_start + prompt_length))
            places.append(np.arange(start, start + length))
            start += length
        return RepeatedRows(np.concatenate(places), self.device)

    @cached_property
    def groups(self) -> list[tuple[Segment, ...]]:
        """The row's segments in groups: a shared prompt with its responses, or one sequence."""
        groups: list[tuple[Segment, ...]] = []
        for segment in self.segments:
            if segment.prompt_length > 0:
                groups[-1] += (segment,)
            else:
                groups.append((segment,))
        return groups

    def mask(
        self, length: int, num_before: int, dtype: torch.dtype, *, window: int | None = None
    ) -> Tensor:
        """Return the additive mask [length, num_before + length] of a segment's queries.

        `num_before` tokens come before the queries. The mask is 0 where a query may attend, and
        -inf elsewhere. It is a view of one mask for all segments and layers, so that autograd keeps
        only that one.
        """
        if (dtype, window) not in self._masks:
            if window is None:
                max_queries = max(s.length for s in self.segments if s.prompt_length)
                max_before = max(s.prompt_length for s in self.segments)
            else:
                max_queries = min(_block_length(window), self.max_queries)
                max_before = min(window - 1, self.max_keys)
            may_attend = torch.ones(
                max_queries, max_before + max_queries, dtype=torch.bool, device=self.device
            )
            may_attend = may_attend.tril(max_before)
            if window is not None:
                may_attend = may_attend.triu(max_before - window + 1)
            self._masks[dtype, window] = _additive(may_attend, dtype)
        full_mask = self._masks[dtype, window]
        max_before = full_mask.shape[1] - full_mask.shape[0]
        return full_mask[:length, max_before - num_before : max_before + length]

    def group_mask(self, index: int, dtype: torch.dtype, *, window: int | None = None) -> Tensor:
        """Return the additive mask [S, S] of a whole group, in which responses do not see each
        other. It is 0 where a token may attend, and -inf elsewhere.

        Args:
            index: the number of the group in `groups`.
        """
        if (index, dtype, window) not in self._masks:
            group = self.groups[index]
            lengths = enumerate(s.length for s in group)
            member = torch.tensor([m for m, n in lengths for _ in range(n)], device=self.device)
            may_attend = (member[:, None] == member) | (member == 0)
            if window is not None:
                position_parts = [torch.arange(s.length) + s.prompt_length for s in group]
                positions = torch.cat(position_parts).to(self.device)
                may_attend &= positions[:, None] - positions < window
            self._masks[index, dtype, window] = _additive(may_attend.tril(), dtype)
        return self._masks[index, dtype, window]


def blocks(length: int, num_before: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Cut the queries of a layer with a window into blocks.

    Yield for each block the slice of its queries, and the slice of keys that their windows cover.
    `length` is the number of queries; `num_before` tokens come before them.
    """
    for start in range(0, length, _block_length(window)):
        end = min(length, start + _block_length(window))
        yield slice(start, end), slice(max(0, num_before + start - window + 1), num_before + end)


def _block_length(window: int) -> int:
    return max(window, _MIN_BLOCK)


def _additive(may_attend: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(may_attend.shape, dtype=dtype, device=may_attend.device)
    return zeros.masked_fill(~may_attend, -torch.inf)
