"""Neighbouring ranks as one engine: each computes a part of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Engine, Generated, Request


class TensorParallelEngine:
    """See `Engine`, with every rank's own requests; all ranks of the group must call each method.

    The parts sample in step: each runs all requests of its group, whose seeds make every part
    draw the same tokens, and a rank keeps the responses to its own.
    """

    def __init__(self, part: Engine, num_parts: int) -> None:
        """Every rank must call this at the same time, with a part of its own."""
        self._part = part
        for first in range(0, dist.get_world_size(), num_parts):
            ranks = range(first, first + num_parts)
            group = dist.new_group(list(ranks))  # every rank takes part in making each group
            if dist.get_rank() in ranks:
                self._group, self._place = group, dist.get_rank() - first
        self._num_parts = num_parts

    @property
    def max_tokens(self) -> int:
        return self._part.max_tokens

    @property
    def has_weights(self) -> bool:
        return self._part.has_weights

    def generate(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        end_ids: frozenset[int],
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Generated]:
        """See `Engine.generate`; `advance` reports the group's progress as this rank's share."""
        of_ranks: list[list[Request]] = [[] for _ in range(self._num_parts)]
        dist.all_gather_object(of_ranks, list(requests), group=self._group)
        together = [request for requests_of_rank in of_ranks for request in requests_of_rank]
        finished = reported = 0

        def advance_share(num: int) -> None:
            nonlocal finished, reported
            finished += num
            share = finished * len(requests) // len(together)
            advance(share - reported)
            reported = share

        generated = self._part.generate(together, settings, end_ids=end_ids, advance=advance_share)
        first = sum(map(len, of_ranks[: self._place]))
        return generated[first : first + len(requests)]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load`: whole tensors, of which each part takes its own."""
        self._part.load(weights)

    def sleep(self) -> None:
        self._part.sleep()

    def close(self) -> None:
        self._part.close()
