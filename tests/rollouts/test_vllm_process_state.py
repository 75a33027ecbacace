"""What stands around a step of vLLM: nothing that is swapped, and an environment that is kept."""

from __future__ import annotations

import gc
import os
import random
import subprocess
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollouts.test_vllm_sleep import sleeping_engine
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Request, generate_all
from vapo.rollouts.engines.vllm.process_state import OwnDraws, ProcessState, environment_kept

SWAPS = [
    (torch, "get_rng_state"),
    (torch, "set_rng_state"),
    (torch.cuda, "get_rng_state_all"),
    (random, "getstate"),
    (random, "setstate"),
    (np.random, "get_state"),
    (np.random, "set_state"),
    (os, "sched_getaffinity"),
    (os, "sched_setaffinity"),
    (torch, "set_num_threads"),
    (gc, "unfreeze"),
    (os, "putenv"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    made: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counted(*args: Any) -> Any:
            made[name] += 1
            return call(*args)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in SWAPS:
        count(owner, name)
    return made


def ask(num: int) -> list[Request]:
    return [Request((2,), seed, SamplingSettings(1)) for seed in range(num)]


def test_steps_and_requests_swap_nothing(calls: Counter[str]) -> None:
    engine, _ = sleeping_engine(0)
    calls.clear()  # pytest sets a variable between fixtures and test
    for _ in range(5):
        generate_all(engine, ask(3))
    assert not calls
    engine.load([])  # this does
    assert calls["get_rng_state"] == calls["set_rng_state"] == calls["sched_setaffinity"] == 1


def test_a_child_that_starts_after_a_step_has_the_trainers_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that compiles sets some, takes others away and changes others."""
    monkeypatch.setenv("OF_THE_TRAINER", "first")
    monkeypatch.setenv("ALSO_OF_THE_TRAINER", "stays")
    engine, vllm = sleeping_engine(0)
    step = vllm.step

    def compiling() -> list[Any]:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/nowhere"
        os.environ["OF_THE_TRAINER"] = "changed"
        del os.environ["ALSO_OF_THE_TRAINER"]
        return step()

    vllm.step = compiling  # type: ignore[method-assign]
    before = subprocess.run(["env"], capture_output=True, check=True).stdout.splitlines()
    generate_all(engine, ask(2))
    after = subprocess.run(["env"], capture_output=True, check=True).stdout.splitlines()
    assert sorted(after) == sorted(before)
    assert os.environ["OF_THE_TRAINER"] == "first"


def test_what_the_trainer_sets_between_two_steps_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SET_LATER", raising=False)
    with environment_kept():
        pass
    monkeypatch.setenv("SET_LATER", "1")
    with environment_kept():
        os.environ["OF_A_STEP"] = "1"
    assert os.environ["SET_LATER"] == "1"
    assert "OF_A_STEP" not in os.environ


def test_no_sampler_needs_nvcc_unless_the_user_asks_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for asked, found in ((None, "0"), ("1", "1")):
        monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
        if asked is not None:
            monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", asked)
        with ProcessState({}).entered():
            assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == found
        assert os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") == asked


def test_the_frozen_heap_of_vllm_stays_frozen(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the trainer had frozen nothing before; the engine's end takes it back."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    with ProcessState({}).entered():
        monkeypatch.setattr(gc, "get_freeze_count", lambda: 10)
    assert calls["unfreeze"] == 0
    assert calls["get_rng_state"] == 1


def test_draws_of_an_engine_without_seeds_are_its_own_and_go_on() -> None:
    """Both are torch's process-wide generator: 0 and 1 by the engine, the others the trainer's."""
    torch.manual_seed(3)
    wanted_by_trainer = torch.rand(2).tolist()
    torch.manual_seed(8)
    wanted_by_engine = torch.rand(2).tolist()
    draws = OwnDraws()
    torch.manual_seed(3)
    draws.begin(8)
    made: dict[str, list[float]] = {"engine": [], "trainer": []}
    for _ in range(2):
        with draws.drawn():
            made["engine"].append(float(torch.rand(1)))
        made["trainer"].append(float(torch.rand(1)))
    assert made == {"engine": wanted_by_engine, "trainer": wanted_by_trainer}


def test_an_engine_without_seeds_begins_anew_with_each_batch() -> None:
    """With the seed of the first request, where nothing is under way."""
    engine, vllm = sleeping_engine(0)
    drawn: list[int] = []
    step = vllm.step

    def drawing() -> list[Any]:
        drawn.append(int(torch.randint(2**31, (1,))))
        return step()

    vllm.step = drawing  # type: ignore[method-assign]
    engine._draws = OwnDraws()
    before = torch.get_rng_state()
    for seed in (4, 5, 4):
        generate_all(engine, [Request((2,), seed, SamplingSettings(1))])
    assert drawn[0] == drawn[2] != drawn[1]
    torch.manual_seed(4)
    assert drawn[0] == int(torch.randint(2**31, (1,)))
    torch.set_rng_state(before)
