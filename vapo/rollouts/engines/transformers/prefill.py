"""Prefills: the tokens before a turn run through the model, on top of what is kept of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from vapo.rollouts.engines.transformers.decoding_rows import OpenTurn
from vapo.rollouts.engines.transformers.kv_cache import aligned_cache

_PREFILL_TOKENS = 16_384  # padded tokens of one prefill forward; bounds its activations
_UNEQUAL = 4  # times as many new tokens as another's are too many for one prefill
_SHORT = 64  # whatever their ratio, so few tokens may be together


@dataclass(frozen=True)
class Prefilled:
    """The cache of distinct prefixes, which all end in its last column, and what comes next.

    `rows` is the prefix of each turn; `num_tokens` how many ran through the model.
    """

    cache: Cache
    logits: Float[Tensor, "P V"]
    width: int
    rows: list[int]
    num_tokens: int


def prefill_chunks(turns: Sequence[OpenTurn]) -> Iterator[list[OpenTurn]]:
    """Cut into pieces of a bounded number of padded tokens, most tokens first.

    Turns with a kept cache are not together with those without.
    """
    turns = sorted(turns, key=lambda turn: (turn.kept is not None, -turn.num_new))
    chunk: list[OpenTurn] = []
    prefixes: set[Hashable] = set()
    for turn in turns:
        prefixes.add(_prefix(turn))
        most = (chunk or [turn])[0]
        is_full = len(prefixes) * most.num_new > _PREFILL_TOKENS
        is_unlike = (most.kept is None) != (turn.kept is None) or (
            turn.kept is not None and most.num_new > _UNEQUAL * turn.num_new + _SHORT
        )
        if chunk and (is_full or is_unlike):
            yield chunk
            chunk, prefixes = [], {_prefix(turn)}
        chunk.append(turn)
    if chunk:
        yield chunk


def prefill(
    model: PreTrainedModel, turns: Sequence[OpenTurn], *, pad_id: int, device: torch.device
) -> Prefilled:
    """Run the tokens before some turns through the model, those of a shared prompt once.

    Right-aligned, all turns run equally many tokens: of a turn that has fewer new ones than
    another, the last of its kept tokens run again in place of padding.
    """
    prefixes = {_prefix(turn): turn for turn in turns}
    place = {prefix: row for row, prefix in enumerate(prefixes)}
    rows = list(prefixes.values())
    lengths = torch.tensor([len(turn.request.ids) for turn in rows])
    width, num_new = int(lengths.max()), max(turn.num_new for turn in rows)
    first = width - num_new
    mask = torch.arange(width) >= (width - lengths)[:, None]
    positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
    kept = [turn.kept for turn in rows if turn.kept is not None]
    cache: Cache = DynamicCache()
    if kept:
        cache = aligned_cache(kept, (lengths - num_new).clamp_(min=0).tolist(), room=num_new)
    logits = model(
        input_ids=_last_ids(rows, num_new, pad_id).to(device),
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
        rows=[place[_prefix(turn)] for turn in turns],
        num_tokens=int(mask[:, first:].sum()),
    )


def _prefix(turn: OpenTurn) -> Hashable:
    """Equal for turns that share a prefill."""
    request = turn.request
    return request.key if turn.kept is not None else (request.key[0], request.ids)


def _last_ids(turns: Sequence[OpenTurn], num: int, pad_id: int) -> Int[Tensor, "P num"]:
    rows = [turn.request.ids[-num:] for turn in turns]
    return torch.tensor([[pad_id] * (num - len(ids)) + list(ids) for ids in rows])
