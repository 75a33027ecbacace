"""Neighbouring ranks as one engine: each computes a part of every layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from vapo.rollouts.engines.engine import Engine, Generated, Request


@dataclass
class _Asked:
    """What a rank asks of its group before a step; `leaves`: it has nothing under way."""

    requests: dict[str, Request] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    leaves: bool = False


class TensorParallelEngine:
    """See `Engine`, with every rank's own requests; all ranks of the group must call each method.

    The parts sample in step: before each step the ranks tell each other what is new, and each part
    runs all requests of its group, whose seeds make every part draw the same tokens. A rank keeps
    the responses to its own, and goes on stepping until all of the group leave.
    """

    is_shared = True

    def __init__(self, part: Engine, num_parts: int) -> None:
        """Every rank must call this at the same time, with a part of its own."""
        self._part, self.max_tokens = part, part.max_tokens
        for first in range(0, dist.get_world_size(), num_parts):
            ranks = range(first, first + num_parts)
            group = dist.new_group(list(ranks))  # every rank takes part in making each group
            if dist.get_rank() in ranks:
                self._group, self._place = group, dist.get_rank() - first
        self._num_parts = num_parts
        self._asked = _Asked()
        self._under_way: set[str] = set()  # of all ranks, each name with its rank's place

    @property
    def has_weights(self) -> bool:
        return self._part.has_weights

    def submit(self, requests: Mapping[str, Request]) -> None:
        """See `Engine.submit`; the next step takes them."""
        self._asked.requests |= requests

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        """See `Engine.results`: one step of the group, whatever is under way here."""
        self._exchange()
        if not self._under_way:
            return {}
        found = self._part.results(self._under_way)
        self._under_way -= found.keys()
        own = f"{self._place}: "
        return {n.removeprefix(own): made for n, made in found.items() if n.startswith(own)}

    def abort(self, names: Collection[str]) -> None:
        """See `Engine.abort`; the next step drops them."""
        self._asked.dropped.extend(names)

    def leave(self) -> None:
        """See `Engine.leave`: steps on as long as another rank of the group needs it."""
        self._asked.leaves = True
        while not self._exchange():
            if self._under_way:
                self._under_way -= self._part.results(self._under_way).keys()
            self._asked.leaves = True

    def _exchange(self) -> bool:
        """Tell the group what is new here and hear what is elsewhere; True if all leave."""
        of_ranks = [_Asked() for _ in range(self._num_parts)]
        dist.all_gather_object(of_ranks, self._asked, group=self._group)
        self._asked = _Asked()
        for place, asked in enumerate(of_ranks):
            dropped = {f"{place}: {name}" for name in asked.dropped} & self._under_way
            if dropped:
                self._part.abort(dropped)
                self._under_way -= dropped
            if named := {f"{place}: {name}": one for name, one in asked.requests.items()}:
                self._part.submit(named)
                self._under_way |= named.keys()
        return all(asked.leaves for asked in of_ranks)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load`: whole tensors, of which each part takes its own."""
        self._part.load(weights)

    def sleep(self) -> None:
        self._part.sleep()

    def close(self) -> None:
        self._part.close()
