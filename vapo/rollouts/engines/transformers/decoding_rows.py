"""The rows that are decoded together: how they are prefilled, decoded and joined.

Their state is on the device; each tensor has one entry for each row.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel

from vapo.rollouts.engines.contract import NonFiniteLogitsError, TurnRequest, turn_name
from vapo.rollouts.engines.transformers.kv_cache import (
    CachedRow,
    aligned_cache,
    join_caches,
    prompt_cache,
)

_ROOM = 64
_PREFILL_TOKENS = 16_384  # padded tokens of one prefill forward; bounds its activations
_UNEQUAL = 4  # turns with a cache share a prefill up to this ratio of their new tokens
_SHORT = 64  # and this many tokens more


@dataclass
class OpenTurn:
    """A turn that is being sampled, or waits for it, with the tokens copied to the host so far.

    `cached_row` has the cache of the first tokens of `request.ids`; None: nothing of them is
    cached.
    """

    request: TurnRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_row: CachedRow | None = None

    @property
    def num_new(self) -> int:
        """How many tokens must run through the model before the first can be sampled."""
        num_kept = 0 if self.cached_row is None else len(self.cached_row.ids)
        return max(1, len(self.request.ids) - num_kept)

    @property
    def prefix(self) -> Hashable:
        """A key that is equal for turns whose tokens so far run through the model only once."""
        key, ids = self.request.key, self.request.ids
        return key if self.cached_row is not None else (key[0], ids)


@dataclass(eq=False)
class DecodingRows:
    """Turns that are decoded together, a row for each: every forward pass gives each row a token.

    A row that has finished stays among them, but its tokens are not recorded, until the rows are
    joined again (`join_rows`). Sampled tokens stay on the device until the row finishes or the rows
    are joined.

    `turns` has each row's turn, and `cache_rows` the index of its row in the cache: after a
    prefill, rows with one prompt share a row there. `draws` has the random numbers of each row's
    tokens.
    """

    turns: list[OpenTurn]
    cache: Cache
    cache_rows: Int[Tensor, " R"]
    cache_mask: Bool[Tensor, "R columns"] | None
    width: int
    prompt_lengths: Int[Tensor, " R"]
    draws: Float64[Tensor, "R _"]
    budgets: Int[Tensor, " R"]  # the most tokens of each row
    counts: Int[Tensor, " R"]  # tokens sampled so far; frozen when the row finishes
    last_ids: Int[Tensor, " R"]

    def __post_init__(self) -> None:
        self.is_alive = torch.ones_like(self.counts, dtype=torch.bool)
        self.num_alive = len(self.turns)
        self._first_counts = self.counts
        self._ids = self.counts.new_empty(len(self.turns), 0)
        self._logprobs = self.draws.new_empty(len(self.turns), 0, dtype=torch.float32)
        self._step_ids: list[Tensor] = []  # of later steps
        self._step_logprobs: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.turns)

    def forward(self, model: PreTrainedModel) -> Float[Tensor, "R V"]:
        """Run a forward pass on every row's last token, and return the logits of its next token."""
        mask = None
        if self.cache_mask is not None:
            if self.width >= self.cache_mask.shape[1]:
                self.cache_mask = pad(self.cache_mask, (0, _ROOM), value=True)
            mask = self.cache_mask[:, : self.width + 1]
        output = model(
            input_ids=self.last_ids[:, None],
            attention_mask=mask,
            position_ids=(self.prompt_lengths + self.counts - 1)[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.width += 1
        return output.logits[:, -1]

    def uniforms(self) -> Float64[Tensor, " R"]:
        """Return each row's random number for its next token."""
        return self.draws.gather(1, self.counts[:, None]).squeeze(1)

    def record(
        self, ids: Int[Tensor, " R"], logprobs: Float[Tensor, " R"], *, stop_ids: Int[Tensor, " _"]
    ) -> list[int]:
        """Record one more token of every row that has not finished.

        A row finishes with a token of `stop_ids`, or when it has its largest number of tokens. This
        is the only point of a step where the host waits for the device, unless a row finishes.

        Returns: the indices of the rows that have finished with this token.
        Raises: NonFiniteLogitsError: the log-prob of a row that had not finished is not finite.
        """
        num_before, was_alive = self.num_alive, self.is_alive
        is_bad = was_alive & ~logprobs.isfinite()
        self.counts = self.counts + was_alive
        is_stop = (ids[:, None] == stop_ids).any(dim=1)
        self.is_alive = was_alive & ~is_stop & (self.counts < self.budgets)
        self.last_ids = ids
        self._step_ids.append(ids)
        self._step_logprobs.append(logprobs)
        self.num_alive, num_bad = torch.stack([self.is_alive.sum(), is_bad.sum()]).tolist()
        if num_bad:
            request = self.turns[int(is_bad.nonzero()[0])].request
            raise NonFiniteLogitsError(turn_name(request))
        if self.num_alive == num_before:
            return []
        finished: list[int] = (was_alive & ~self.is_alive).nonzero().squeeze(1).tolist()
        return finished

    def drop(self, turn: OpenTurn) -> None:
        """Mark the turn's row as finished, so that no more of its tokens are recorded."""
        self.is_alive[self.turns.index(turn)] = False
        self.num_alive -= 1

    def write_out(self, rows: list[int]) -> list[OpenTurn]:
        """Copy the tokens sampled for these rows from the device to their turns; return the turns.

        This may be done only once for each row.
        """
        turns = [self.turns[row] for row in rows]
        if self._step_ids:  # put together once: rows that finish one by one do not pay for all
            self._ids = torch.cat([self._ids, torch.stack(self._step_ids, dim=1)], dim=1)
            step_logprobs = torch.stack(self._step_logprobs, dim=1)
            self._logprobs = torch.cat([self._logprobs, step_logprobs], dim=1)
            self._step_ids, self._step_logprobs = [], []
        index = torch.tensor(rows, device=self.counts.device)
        ids = self._ids[index].tolist()
        logprobs = self._logprobs[index].tolist()
        nums = (self.counts - self._first_counts)[index].tolist()
        for turn, row_ids, row_logprobs, num in zip(turns, ids, logprobs, nums, strict=True):
            turn.ids.extend(row_ids[:num])
            turn.logprobs.extend(row_logprobs[:num])
        return turns

    def make_cached_rows(self, rows: list[int]) -> list[CachedRow]:
        """Return each row's cache of all tokens but the last; the rows have just finished."""
        entries = []
        for row, cache_row in zip(rows, self.cache_rows[rows].tolist(), strict=True):
            ids = (*self.turns[row].request.ids, *self.turns[row].ids[:-1])
            entries.append(CachedRow(ids, self.cache, row=cache_row, first=self.width - len(ids)))
        return entries


def join_rows(parts: Sequence[DecodingRows], *, max_tokens: int) -> DecodingRows | None:
    """Join the rows of several parts that have not finished, to be decoded together.

    Their tokens so far are copied to their turns. Columns of the cache left of the longest row's
    first token are dropped. `max_tokens` limits the spare columns.

    Returns: the joined rows; None if all rows have finished.
    """
    room = min(_ROOM, max_tokens)
    parts = [part for part in parts if part.num_alive]
    if not parts:
        return None
    pairs = [(part, part.is_alive.nonzero().squeeze(1)) for part in parts]

    def join(name: str) -> Tensor:
        return torch.cat([getattr(part, name)[index] for part, index in pairs])

    prompt_lengths, counts = join("prompt_lengths"), join("counts")
    # The last token of a row is not in the cache yet: the next forward puts it there.
    cached_lengths = prompt_lengths + counts - 1
    width, shortest = torch.stack([cached_lengths.max(), cached_lengths.min()]).tolist()
    cache_mask = None
    if shortest < width:
        columns = torch.arange(width + room, device=counts.device)
        cache_mask = columns >= (width - cached_lengths)[:, None]
    caches = [(part.cache, part.cache_rows[index]) for part, index in pairs]
    return DecodingRows(
        [turn for part, index in pairs for turn in part.write_out(index.tolist())],
        cache=join_caches(caches, width=width, room=room),
        cache_rows=torch.arange(len(counts), device=counts.device),
        cache_mask=cache_mask,
        width=width,
        prompt_lengths=prompt_lengths,
        draws=join("draws"),
        budgets=join("budgets"),
        counts=counts,
        last_ids=join("last_ids"),
    )


class Prefilled(NamedTuple):
    """The result of `prefill`: a cache with a row for each different prefix, and the next logits.

    A prefix is what comes before one or several turns. All prefixes end in the last of the cache's
    `width` columns. `rows` has for each turn the row of its prefix. `num_tokens` tokens ran through
    the model.
    """

    cache: Cache
    logits: Float[Tensor, "P V"]
    width: int
    rows: list[int]
    num_tokens: int


def prefill_chunks(turns: Sequence[OpenTurn], *, pads: bool = True) -> Iterator[list[OpenTurn]]:
    """Yield turns in chunks, each of which one `prefill` runs, the longest turns first.

    A chunk has a bounded number of tokens that must run, with padding. Turns of which the first
    tokens are cached and turns of which none are cached are in different chunks.

    Args:
        pads: whether a chunk may have turns with different numbers of tokens to run.
    """
    turns = sorted(turns, key=lambda turn: (turn.cached_row is not None, -turn.num_new))
    chunk: list[OpenTurn] = []
    prefixes: set[Hashable] = set()
    for turn in turns:
        prefixes.add(turn.prefix)
        longest = (chunk or [turn])[0]
        is_full = len(prefixes) * longest.num_new > _PREFILL_TOKENS
        is_unlike = (longest.cached_row is None) != (turn.cached_row is None) or (
            turn.cached_row is not None and longest.num_new > _UNEQUAL * turn.num_new + _SHORT
        )
        if chunk and (is_full or is_unlike or (not pads and longest.num_new != turn.num_new)):
            yield chunk
            chunk, prefixes = [], {turn.prefix}
        chunk.append(turn)
    if chunk:
        yield chunk


def prefill(
    model: PreTrainedModel,
    turns: Sequence[OpenTurn],
    *,
    pad_id: int,
    device: torch.device,
    is_recurrent: bool = False,
) -> Prefilled:
    """Run the tokens before some turns through the model, and return the cache and the next logits.

    A prompt that turns share runs once. Rows are right-aligned, and equally many tokens of each
    run. If a turn has fewer tokens that are not cached than another, the last of its cached tokens
    run again in place of padding.

    Args:
        pad_id: fills rows on the left; it is masked.
        is_recurrent: whether the model has recurrent layers; then all turns must have equally many
            tokens before them.
    """
    prefixes = {turn.prefix: turn for turn in turns}
    place = {prefix: row for row, prefix in enumerate(prefixes)}
    rows = list(prefixes.values())
    lengths = torch.tensor([len(turn.request.ids) for turn in rows])
    width, num_new = int(lengths.max()), max(turn.num_new for turn in rows)
    first = width - num_new
    mask = torch.arange(width) >= (width - lengths)[:, None]
    positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
    cached_rows = [turn.cached_row for turn in rows if turn.cached_row is not None]
    # Rows are right-aligned, so that Transformers' mask of a window, which counts columns, is that
    # of the tokens' positions.
    cache: Cache = prompt_cache(model.config, is_recurrent=is_recurrent)
    if cached_rows:
        cache = aligned_cache(cached_rows, (lengths - num_new).clamp_(min=0).tolist(), room=num_new)
    last = [turn.request.ids[-num_new:] for turn in rows]
    input_ids = torch.tensor([[pad_id] * (num_new - len(ids)) + list(ids) for ids in last])
    logits = model(
        input_ids=input_ids.to(device),
        attention_mask=None if bool(mask.all()) else mask.to(device),
        position_ids=positions[:, first:].to(device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    return Prefilled(
        cache=cache,
        logits=logits,
        width=width,
        rows=[place[turn.prefix] for turn in turns],
        num_tokens=int(mask[:, first:].sum()),
    )
