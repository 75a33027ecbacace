"""The rows that are decoded together: their state on the device, one place of each tensor a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel

from vapo.rollouts.engines.transformers.kv_cache import CachedRows, join_caches

_ROOM = 64

Write = Callable[[int, list[int], list[float]], None]


class DecodingRows:
    """Rows in step: every forward samples one token for each of them.

    A row that has finished stays in step, unrecorded, until the rows are joined again. Sampled
    tokens stay on the device and are written out once, when the rows are joined.

    `requests` is the index of each row's response; `cache_rows` the index of its row in the cache
    (after a prefill several rows share their prompt's).
    """

    def __init__(
        self,
        requests: list[int],
        *,
        cache: Cache,
        cache_rows: Int[Tensor, " R"],
        cache_mask: Bool[Tensor, "R columns"] | None,
        width: int,
        prompt_lengths: Int[Tensor, " R"],
        draws: Float64[Tensor, "R _"],
        budgets: Int[Tensor, " R"],
        counts: Int[Tensor, " R"],
        last_ids: Int[Tensor, " R"],
    ) -> None:
        self.requests = requests
        self.cache, self.cache_rows, self.cache_mask = cache, cache_rows, cache_mask
        self.width = width
        self.prompt_lengths = prompt_lengths
        self.draws = draws
        self.budgets = budgets  # the most tokens of each row
        self.counts = counts  # tokens sampled so far; frozen when the row finishes
        self.last_ids = last_ids
        self.is_alive = torch.ones_like(counts, dtype=torch.bool)
        self.num_alive = len(requests)
        self._first_counts = counts
        self._step_ids: list[Tensor] = []
        self._step_logprobs: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.requests)

    def forward(self, model: PreTrainedModel) -> Float[Tensor, "R V"]:
        """Run a forward pass on every row's last token; return the logits of the next one."""
        mask = None
        if self.cache_mask is not None:
            if self.width >= self.cache_mask.shape[1]:
                self.cache_mask = torch.nn.functional.pad(self.cache_mask, (0, _ROOM), value=True)
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
        """Each row's random number for its next token."""
        return self.draws.gather(1, self.counts[:, None]).squeeze(1)

    def record(
        self,
        ids: Int[Tensor, " R"],
        logprobs: Float[Tensor, " R"],
        *,
        stop_ids: Int[Tensor, " _"],
    ) -> bool:
        """Record one more token of every live row. False if a live row's log-prob is not finite.

        The only point of a step where the host waits for the device.
        """
        is_bad = self.is_alive & ~logprobs.isfinite()
        self.counts = self.counts + self.is_alive
        is_stop = (ids[:, None] == stop_ids).any(dim=1)
        self.is_alive = self.is_alive & ~is_stop & (self.counts < self.budgets)
        self.last_ids = ids
        self._step_ids.append(ids)
        self._step_logprobs.append(logprobs)
        self.num_alive, num_bad = torch.stack([self.is_alive.sum(), is_bad.sum()]).tolist()
        return num_bad == 0

    def write_out(self, write: Write) -> None:
        """Hand each row's recorded tokens to `write(request, ids, logprobs)`; once, at the end."""
        ids = torch.stack(self._step_ids, dim=1).tolist()
        logprobs = torch.stack(self._step_logprobs, dim=1).tolist()
        nums = (self.counts - self._first_counts).tolist()
        for request, row_ids, row_logprobs, num in zip(
            self.requests, ids, logprobs, nums, strict=True
        ):
            write(request, row_ids[:num], row_logprobs[:num])


def join_rows(parts: Sequence[DecodingRows], *, max_tokens: int) -> DecodingRows | None:
    """Join the live rows of all parts; None if there are none.

    Columns left of the longest live row's first token are dropped.
    """
    room = min(_ROOM, max_tokens)
    parts = [part for part in parts if part.num_alive]
    if not parts:
        return None
    alive = [part.is_alive.nonzero().squeeze(1) for part in parts]

    def join(name: str) -> Tensor:
        pairs = zip(parts, alive, strict=True)
        return torch.cat([getattr(part, name)[index] for part, index in pairs])

    prompt_lengths, counts = join("prompt_lengths"), join("counts")
    # The last token of a row is not in the cache yet: the next forward puts it there.
    cached_lengths = prompt_lengths + counts - 1
    width, shortest = torch.stack([cached_lengths.max(), cached_lengths.min()]).tolist()
    cache_mask = None
    if shortest < width:
        columns = torch.arange(width + room, device=counts.device)
        cache_mask = columns >= (width - cached_lengths)[:, None]
    cache = join_caches(
        [
            CachedRows(part.cache, part.cache_rows[index])
            for part, index in zip(parts, alive, strict=True)
        ],
        width=width,
        room=room,
    )
    return DecodingRows(
        [
            part.requests[row]
            for part, index in zip(parts, alive, strict=True)
            for row in index.tolist()
        ],
        cache=cache,
        cache_rows=torch.arange(len(counts), device=counts.device),
        cache_mask=cache_mask,
        width=width,
        prompt_lengths=prompt_lengths,
        draws=join("draws"),
        budgets=join("budgets"),
        counts=counts,
        last_ids=join("last_ids"),
    )
