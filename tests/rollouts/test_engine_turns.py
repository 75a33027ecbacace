"""Turns over an engine of its own, on a double: names, and who is next to use the engine."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

from tests.rollouts.turns_contract import SETTINGS, first_requests
from vapo.rollouts.engines import sampler
from vapo.rollouts.engines.engine import Generated, Request, SteppedEngine


class FakeEngine(SteppedEngine):
    """Remembers what is open."""

    max_tokens, has_weights = 64, True

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[str, Request] = {}

    def _begin(self, requests: Any) -> None:
        self.open.update(requests)

    def _step(self) -> dict[str, Generated]:
        return {}

    def _drop(self, names: Any) -> None:
        for name in names:
            del self.open[name]

    def load(self, weights: Any) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...


def test_streams_of_several_processes_name_their_episodes_differently() -> None:
    """One server has those of every rank, and of runs that have ended."""
    engine = FakeEngine()
    names: list[str | None] = []
    for _ in range(2):  # the module as each of two processes has it
        spec = importlib.util.find_spec(sampler.__name__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        stream = module.EngineTurns(engine, SETTINGS, seed=7, end_ids=frozenset([1]))
        for request in first_requests(2):
            stream.submit(request)
        stream.step()
        names += [request.episode for request in engine.open.values()]
        stream.drop()
        assert not engine.open
    assert len(names) == 8
    assert len(set(names)) == 8


def test_a_thread_that_submits_is_before_the_next_step_of_another() -> None:
    engine = FakeEngine()
    num_late = 0
    threads: list[threading.Thread] = []

    def submit() -> None:
        engine.submit({str(len(threads)): Request((2,), 1, SETTINGS)})

    def step() -> dict[str, Generated]:
        nonlocal num_late
        if len(threads) == len(engine.open):  # the last one's request has come
            threads.append(threading.Thread(target=submit))
            threads[-1].start()
            threads[-1].join(0.01)  # it waits for the end of this step
            assert len(threads) > len(engine.open)
        else:
            num_late += 1
        return {}

    engine._step = step  # type: ignore[method-assign]
    while len(threads) < 30:
        engine.results(["nobody's"])
    threads[-1].join(10)
    assert num_late == 0
