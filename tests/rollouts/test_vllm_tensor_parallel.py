"""Which requests the parts of an engine run, and which responses each rank keeps.

Two real parts: `test_two_sharded_processes` in tests/integration/test_vllm_fit.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Generated, Request, TensorParallelEngine, generate_all

SETTINGS = SamplingSettings(4)
OF_RANKS = {
    0: [Request((9,), 100, SETTINGS)],
    1: [],
    2: [Request((2,), 0, SETTINGS), Request((3,), 1, SETTINGS)],
    3: [Request((4,), 2, SETTINGS), Request((5,), 3, SETTINGS), Request((6,), 4, SETTINGS)],
}


class Part:
    """Answers each request with its seed, one at a step, the oldest first."""

    max_tokens, has_weights, is_shared = 64, True, False

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.open: dict[str, Request] = {}
        self.asked: list[set[str]] = []

    def submit(self, requests: Mapping[str, Request]) -> None:
        self.seen += requests.values()
        self.open |= requests

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        assert set(names) == self.open.keys()
        self.asked.append(set(names))
        name = next(iter(self.open))
        return {name: Generated((self.open.pop(name).seed,), (-0.5,))}

    def abort(self, names: Collection[str]) -> None:
        for name in names:
            del self.open[name]


def on_ranks(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[int, TensorParallelEngine], Any]
) -> tuple[list[Any], list[Part]]:
    """What `work` returns on each of four ranks, threads that exchange in groups of two."""
    own, parts = threading.local(), [Part() for _ in range(4)]
    barriers = [threading.Barrier(2, timeout=20) for _ in range(2)]
    boards: list[dict[int, Any]] = [{}, {}]

    def gather(found: list[Any], mine: Any, group: list[int]) -> None:
        assert own.rank in group
        pair = group[0] // 2
        boards[pair][own.rank] = mine
        barriers[pair].wait()
        found[:] = [boards[pair][rank] for rank in group]
        barriers[pair].wait()

    monkeypatch.setattr(dist, "get_rank", lambda: own.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", lambda ranks: ranks)
    monkeypatch.setattr(dist, "all_gather_object", gather)

    def run(rank: int) -> Any:
        own.rank = rank
        return work(rank, TensorParallelEngine(parts[rank], 2))  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(run, range(4))), parts


def test_a_rank_keeps_its_own_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with fewer requests, or none, step on until the others of their group leave."""
    found, parts = on_ranks(
        monkeypatch,
        lambda rank, engine: generate_all(engine, OF_RANKS[rank]),
    )
    for rank, part in enumerate(parts):
        assert [result.ids for result in found[rank]] == [(r.seed,) for r in OF_RANKS[rank]]
        group = (0, 1) if rank < 2 else (2, 3)
        assert part.seen == [request for other in group for request in OF_RANKS[other]]
        assert part.asked == parts[group[0]].asked, "the parts sample in step"
        assert not part.open


def test_requests_come_and_go_while_others_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second turn is asked for once the first is there, and a request is given up."""

    def work(rank: int, engine: TensorParallelEngine) -> list[tuple[int, ...]]:
        found: dict[str, Generated] = {}
        engine.submit({"first": Request((2,), rank, SETTINGS)})
        engine.submit({"dropped": Request((3,), 50 + rank, SETTINGS)})
        while "first" not in found:
            found |= engine.results(["first"])
        engine.abort(["dropped"])
        engine.submit({"second": Request((4,), 10 + rank, SETTINGS)})
        while "second" not in found:
            found |= engine.results(["second"])
        engine.leave()
        return [found[name].ids for name in ("first", "second")]

    found, parts = on_ranks(monkeypatch, work)
    assert found == [[(rank,), (10 + rank,)] for rank in range(4)]
    for rank, part in enumerate(parts):
        assert part.asked == parts[rank - rank % 2].asked
        assert not part.open
