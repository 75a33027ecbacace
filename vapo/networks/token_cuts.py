"""Cut rows into the chunks of one forward pass each, by a budget of tokens."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence

import torch

from vapo.networks.token_inputs import Layout, critic_prompt
from vapo.system.distributed import max_over_ranks
from vapo.types import RolloutBatch


def cut_rollouts(
    batch: RolloutBatch,
    rows: Sequence[int],
    *,
    max_tokens: int,
    layout: Layout,
    for_critic: bool = False,
) -> list[list[int]]:
    """Cut rows of a rollout batch by the lengths that the network reads (`cut_by_tokens`)."""
    rollouts = batch.rollouts
    prompts = [critic_prompt(r.prompt) if for_critic else r.prompt.prompt_ids for r in rollouts]
    lengths = [len(p) + len(r.response_ids) for p, r in zip(prompts, rollouts, strict=True)]
    return cut_by_tokens(lengths, rows, max_tokens=max_tokens, layout=layout, prompts=prompts)


def cut_by_tokens(
    lengths: Sequence[int],
    rows: Sequence[int],
    *,
    max_tokens: int,
    layout: Layout = "padded",
    prompts: Sequence[tuple[int, ...]] | None = None,
) -> list[list[int]]:
    """Cut rows into chunks of at most `max_tokens` tokens: with padding, or packed without.

    `lengths[row]` is the row's prompt + response length; a row longer than the budget gets a
    chunk of its own. All ranks get equally many chunks, since every forward of a sharded network
    is a collective, and each rank's largest come first, so that ranks wait little for each other.
    Padded, rows of similar length go together; packed, the chunks are about equally large. Where
    prompts are shared, the rows of one go together, and each chunk counts it once.

    Args:
        prompts: of each row, needed where they are shared.
    """
    load = _Load(lengths, rows, prompts if layout == "shared_prompts" else None)
    if layout == "padded":
        chunks = _padded_chunks(lengths, rows, max_tokens)
    elif load.repeats_prompts:
        chunks = _grouped_chunks(load, rows, max_tokens)
    else:
        chunks = _packed_chunks(lengths, rows, max_tokens)
    wanted = int(max_over_ranks(torch.tensor(len(chunks))))
    while len(chunks) < wanted:
        largest = max((c for c in chunks if len(c) > 1), key=load)
        chunks.remove(largest)
        chunks += [largest[::2], largest[1::2]] if layout == "packed" else _halves(largest)
    return sorted(chunks, key=load, reverse=True)


class _Load:
    """The tokens of a chunk, in which each prompt counts once. Without prompts all rows differ."""

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        prompts: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.lengths = lengths
        numbers: dict[object, int] = {}  # a prompt is compared once, its number often
        self.group = {
            row: numbers.setdefault(row if prompts is None else prompts[row], len(numbers))
            for row in rows
        }
        self.prompt_length = {row: 0 if prompts is None else len(prompts[row]) for row in rows}
        self.repeats_prompts = len(numbers) < len(rows)

    def __call__(self, chunk: Sequence[int]) -> int:
        once = {self.group[row]: self.prompt_length[row] for row in chunk}
        responses = sum(self.lengths[row] - self.prompt_length[row] for row in chunk)
        return responses + sum(once.values())


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
    num_chunks = max(1, -(-sum(lengths[row] for row in rows) // max_tokens))
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


def _grouped_chunks(load: _Load, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The fewest chunks of neighbours, the rows of a prompt being neighbours, and the most even.

    A prompt whose rows lie in two chunks is computed in both, so that happens only where chunks
    would be more without it.
    """
    neighbours = sorted(rows, key=load.group.__getitem__)
    single = [[row] for row in neighbours]
    grouped = [list(group) for _, group in itertools.groupby(neighbours, load.group.__getitem__)]
    whole = [
        part
        for group in grouped
        for part in ([group] if load(group) <= max_tokens else [[row] for row in group])
    ]
    num_chunks = len(_filled(load, single, max_tokens))
    parts = single if len(_filled(load, whole, max_tokens)) > num_chunks else whole
    limit = bisect.bisect_left(
        range(max_tokens),
        True,
        key=lambda limit: len(_filled(load, parts, limit)) <= num_chunks,
    )
    return _filled(load, parts, limit)


def _filled(load: _Load, parts: Sequence[list[int]], limit: int) -> list[list[int]]:
    """Parts in their order, each in the last chunk if that stays within the limit."""
    chunks: list[list[int]] = []
    total = 0
    for part in parts:
        own = load(part)
        more = own
        if chunks and load.group[part[0]] == load.group[chunks[-1][-1]]:
            more -= load.prompt_length[part[0]]
        if chunks and total + more <= limit:
            chunks[-1] += part
            total += more
        else:
            chunks.append(list(part))
            total = own
    return chunks
