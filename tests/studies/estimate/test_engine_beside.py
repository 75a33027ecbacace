"""What `sleep_level: auto` becomes on a GPU of a given size, which need not be there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.fits import fit_config
from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.rollouts.engines.vllm.engine_args import EngineSize, engine_arguments
from vapo.studies.estimate.engine_beside import choose_sleep, with_sleep_level
from vapo.studies.estimate.memory import MemoryEstimate
from vapo.system.host_memory import GIB

VLLM = ("rollouts.engine=vllm",)


@pytest.mark.parametrize(
    ("device", "engine", "training", "level"),
    [
        (141, 42.3, 15.0, 0),  # 42.3 + 1.1 * 15 + 1.5 = 60.3
        (80, 40.0, 35.0, 0),  # 40 + 38.5 + 1.5 = 80
        (80, 40.0, 35.1, 1),
        (24, 12.0, 11.0, 1),
    ],
)
def test_by_the_sum_of_both(device: float, engine: float, training: float, level: int) -> None:
    sizes = {"device": device * GIB, "engine": engine * GIB, "training": training * GIB}
    assert choose_sleep(**sizes).level == level


def chosen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *overrides: str,
    training_gib: float = 10.0,
    gpu_gib: float = 80.0,
) -> tuple[FitConfig, list[str]]:
    """The config on such a GPU, with such an estimate, and what is said."""

    def estimated(config: FitConfig) -> MemoryEstimate:
        assert config.rollouts.vllm.kv_cache_memory_bytes is not None  # type: ignore[attr-defined]
        stages = {
            "sampling": {"vLLM weights": 2.0 * GIB, "vLLM KV cache": 8.0 * GIB, "rest": 99.0 * GIB},
            "log-probs": {"weights": 1.0 * GIB},
            "actor update": {"weights": 1.0 * GIB, "activations": (training_gib - 1) * GIB},
        }
        return MemoryEstimate(stages, {}, 1)

    card = SimpleNamespace(total_memory=gpu_gib * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    lines: list[str] = []
    config = fit_config(tmp_path, *overrides, "trainer.accelerator=gpu")
    return with_sleep_level(config, estimated, lines.append), lines


def level_of(config: FitConfig) -> Any:
    rollouts: Any = config.rollouts
    return rollouts.vllm.sleep_level


def test_it_stays_awake_where_there_is_room_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default vLLM has half of the GPU: 40 + 1.1 * 34 + 1.5 is 78.9 GiB, one more is 80.0."""
    config, lines = chosen(tmp_path, monkeypatch, *VLLM, training_gib=34)
    assert level_of(config) == 0
    assert lines == [
        "vLLM stays awake while the networks train: 40.0 GiB of the engine and about 34.0 of "
        "training fit the GPU's 80.0 together (rollouts.vllm.sleep_level)"
    ]
    config, lines = chosen(tmp_path, monkeypatch, *VLLM, training_gib=35.1)
    assert level_of(config) == 1
    assert lines[0].startswith("vLLM sleeps while the networks train: 40.0 GiB of the engine and")


def test_an_engine_with_a_cache_of_a_given_size_takes_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 of weights, 8 of the cache and 2 of CUDA graphs, 1.1 * 10 and 1.5: 24.5 GiB."""
    size = "rollouts.vllm.kv_cache_memory_bytes=8589934592"
    assert level_of(chosen(tmp_path, monkeypatch, *VLLM, size, gpu_gib=24.6)[0]) == 0
    assert level_of(chosen(tmp_path, monkeypatch, *VLLM, size, gpu_gib=24.4)[0]) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        (*VLLM, "rollouts.vllm.sleep_level=0"),
        (*VLLM, "rollouts.vllm.sleep_level=1"),
        (*VLLM, "rollouts.vllm.sleep_level=2"),
        (),
    ],
)
def test_what_is_decided_already_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    config, lines = chosen(tmp_path, monkeypatch, *overrides)
    assert lines == []
    assert config == fit_config(tmp_path, *overrides, "trainer.accelerator=gpu")


def test_without_a_gpu_nothing_is_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = fit_config(tmp_path, *VLLM)
    lines: list[str] = []
    assert with_sleep_level(config, lambda config: None, lines.append) is config  # type: ignore[arg-type, return-value]
    assert lines == []


def test_without_an_estimate_it_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(tmp_path, monkeypatch)  # a GPU

    def none(config: FitConfig) -> MemoryEstimate:
        raise UserError("this model is not known")

    lines: list[str] = []
    config = fit_config(tmp_path, *VLLM, "trainer.accelerator=gpu")
    assert level_of(with_sleep_level(config, none, lines.append)) == 1
    assert lines == ["vLLM sleeps while the networks train: no estimate: this model is not known"]


def test_an_engine_that_stays_awake_has_no_sleep_mode(tmp_path: Path) -> None:
    """vLLM's allocator for it is not used then."""
    for level, has_sleep_mode in (("0", False), ("1", True), ("2", True), ("auto", True)):
        config = fit_config(tmp_path, *VLLM, f"rollouts.vllm.sleep_level={level}")
        rollouts: Any = config.rollouts
        size = EngineSize(64, 8)
        arguments = engine_arguments(
            rollouts.vllm, size, model_path="m", dtype="float32", on_gpu=True
        )
        assert arguments["enable_sleep_mode"] is has_sleep_mode
