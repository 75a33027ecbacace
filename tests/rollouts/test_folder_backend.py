"""The backend that a vLLM server gets weights by, on stand-ins for vLLM's own modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vapo.rollouts.engines.vllm.cpu_heads import HEAD_SIZE, PaddedHeads

BACKEND = "vapo.rollouts.engines.vllm_server.folder_backend"


class Engine:
    """What vLLM's own class has that is used: the model, its config, the parsed request."""

    def __init__(self, model: Any, **hf_config: Any) -> None:
        self.model = model
        self.vllm_config = None
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(**hf_config))

    def parse_update_info(self, update_info: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_info)  # type: ignore[attr-defined]


class Factory:
    registered: dict[str, type]

    @classmethod
    def register_engine(cls, name: str, engine: type) -> None:
        if name in cls.registered:
            raise ValueError(f"{name} is registered already")
        cls.registered[name] = engine


class Model:
    is_direct = False

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        self.steps.append("load")
        self.weights |= dict(weights)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def module(name: str, **contents: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    Factory.registered = {}
    for name in ("vllm", "vllm.distributed", "vllm.model_executor"):
        module(name)
    for name in ("vllm.distributed.weight_transfer", "vllm.model_executor.model_loader"):
        module(name)
    module(
        "vllm.distributed.weight_transfer.base",
        WeightTransferEngine=Engine,
        WeightTransferInitInfo=object,
        WeightTransferUpdateInfo=object,
    )
    module("vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=Factory)
    module(
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=lambda model: model.steps.append("begin"),
        finalize_layerwise_reload=lambda model, config: model.steps.append("end"),
    )
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    made = importlib.import_module(BACKEND)
    monkeypatch.setattr(made, "loads_directly", lambda model, config: model.is_direct)
    yield made
    sys.modules.pop(BACKEND, None)


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_all_files_of_the_folder_are_loaded_between_begin_and_end(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_accelerator: bool
) -> None:
    """And waited for where there is an accelerator, which a CPU has not."""
    model, waits = Model(), list[bool]()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(True))
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    engine = backend.FolderBackend(model)
    engine.init_transfer_engine(backend.FolderInit())
    engine.start_weight_update()
    engine.update_weights({"folder": str(tmp_path)})
    engine.finish_weight_update()
    engine.shutdown()
    assert model.steps == ["begin", "load", "load", "end"]
    assert {name: w.tolist() for name, w in model.weights.items()} == {"a": [1, 1], "b": [0, 0, 0]}
    assert waits == [True] * has_accelerator


def test_a_model_that_needs_no_processing_is_loaded_in_place(backend: Any, tmp_path: Path) -> None:
    """Its layers are neither set aside nor put back."""
    model = Model()
    model.is_direct = True
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    engine = backend.FolderBackend(model)
    engine.start_weight_update()
    engine.receive_weights(backend.FolderUpdate(str(tmp_path)))
    engine.finish_weight_update()
    assert model.steps == ["load"]


def test_padded_heads_get_padded_weights(backend: Any, tmp_path: Path) -> None:
    weight = torch.arange(8.0).reshape(4, 2)
    save_file({"model.layers.0.self_attn.q_proj.weight": weight}, tmp_path / "1.safetensors")
    model = Model()
    engine = backend.FolderBackend(model, **{HEAD_SIZE: 2, "head_dim": 4})
    engine.receive_weights(backend.FolderUpdate(str(tmp_path)))
    name = "model.layers.0.self_attn.q_proj.weight"
    ((_, expected),) = PaddedHeads(2, 4, {}).weights([(name, weight)])
    assert torch.equal(model.weights[name], expected)
    assert expected.shape == (8, 2)


def test_a_folder_that_the_server_does_not_see_is_named(backend: Any, tmp_path: Path) -> None:
    engine = backend.FolderBackend(Model())
    with pytest.raises(FileNotFoundError, match=r"no weights in .*weights_folder must be on"):
        engine.receive_weights(backend.FolderUpdate(str(tmp_path)))


def test_it_is_registered_once_in_each_process(backend: Any) -> None:
    backend.register()
    backend.register()
    assert Factory.registered == {"vapo_folder": backend.FolderBackend}
