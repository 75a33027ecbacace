"""Which requests the parts of an engine run, and which responses each rank keeps.

Two real parts: `test_two_sharded_processes` in tests/integration/test_vllm_fit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Generated, Request
from vapo.rollouts.engines.tensor_parallel import TensorParallelEngine

OF_RANKS = {
    0: [Request((9,), 100)],
    1: [],
    2: [Request((2,), 0), Request((3,), 1)],
    3: [Request((4,), 2), Request((5,), 3), Request((6,), 4)],
}


class Part:
    """Answers each request with its seed, three at a time."""

    max_tokens, has_weights = 64, True

    def __init__(self) -> None:
        self.seen: list[Request] = []

    def generate(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        end_ids: frozenset[int],
        advance: Callable[[int], None],
    ) -> list[Generated]:
        self.seen.extend(requests)
        for start in range(0, len(requests), 3):
            advance(len(requests[start : start + 3]))
        return [Generated((request.seed,), (-0.5,)) for request in requests]


def on_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[TensorParallelEngine, Part]:
    def gather(asked: list[list[Request]], mine: list[Request], group: list[int]) -> None:
        assert mine == OF_RANKS[rank]
        assert rank in group
        asked[:] = [OF_RANKS[other] for other in group]

    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", lambda ranks: ranks)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    part = Part()
    return TensorParallelEngine(part, 2), part  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", OF_RANKS)
def test_a_rank_keeps_its_own_responses(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, part = on_rank(rank, monkeypatch)
    steps: list[int] = []
    generated = engine.generate(
        OF_RANKS[rank], SamplingSettings(4), end_ids=frozenset([1]), advance=steps.append
    )
    assert [result.ids for result in generated] == [(r.seed,) for r in OF_RANKS[rank]]
    group = (0, 1) if rank < 2 else (2, 3)
    assert part.seen == [request for other in group for request in OF_RANKS[other]]
    assert sum(steps) == len(OF_RANKS[rank])
