"""The order of sleep, wake and push on a GPU, on a recorded vLLM: no GPU, so the order only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Request, SteppedEngine, generate_all
from vapo.rollouts.engines.vllm.colocated import ColocatedEngine
from vapo.rollouts.engines.vllm.process_state import ProcessState


class RecordedVllm:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.asked: list[str] = []
        self.engine_core = self

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    def collective_rpc(self, method: Any, args: Any) -> None:
        self.calls.append((method.__name__, [name for name, _ in args[0]]))

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        assert reset_running_requests
        self.calls.append("reset_prefix_cache")
        return True

    def get_output(self) -> None: ...

    def has_unfinished_requests(self) -> bool:
        return bool(self.asked)

    def step(self) -> list[Any]:
        """Every request is done at once, with the token 3."""
        done, self.asked = self.asked, []
        scored = SimpleNamespace(start_indices=[0], token_ids=[3], logprobs=[-1.0])
        token = SimpleNamespace(token_ids=[3], logprobs=scored)
        return [SimpleNamespace(request_id=name, outputs=[token]) for name in done]


def sleeping_engine(level: int) -> tuple[ColocatedEngine, RecordedVllm]:
    engine, vllm = ColocatedEngine.__new__(ColocatedEngine), RecordedVllm()
    SteppedEngine.__init__(engine)
    engine._add = lambda name, *_: vllm.asked.append(name)  # type: ignore[method-assign]
    engine._engine, engine._state, engine._heads = vllm, ProcessState({}), None
    engine._draws = None
    engine._timeout_s, engine._sleep_level, engine._is_asleep = 60.0, level, False
    engine.has_weights = True
    return engine, vllm


@pytest.mark.parametrize(("level", "keeps_weights"), [(1, True), (2, False)])
def test_weights_wake_before_the_push_and_the_cache_after_it(level, keeps_weights):
    engine, vllm = sleeping_engine(level)
    engine.sleep()
    engine.sleep()  # asleep already
    assert engine.has_weights is keeps_weights
    engine.load([])
    assert engine.has_weights
    assert vllm.calls == [
        ("sleep", level),
        ("wake_up", ["weights"]),
        ("load_into", []),
        "reset_prefix_cache",
        ("wake_up", ["kv_cache"]),
    ]


def test_sampling_wakes_what_sleeps_once():
    engine, vllm = sleeping_engine(1)
    engine.sleep()
    for _ in range(2):
        generate_all(engine, [Request((2,), 0, SamplingSettings(1))])
    assert vllm.calls == [("sleep", 1), ("wake_up", None)]


def test_level_0_and_a_cpu_do_not_sleep():
    engine, vllm = sleeping_engine(0)
    engine.sleep()
    assert vllm.calls == []
