"""What the trainer asks of a GPU, on tensors that are on one by name and have no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vapo.config.networks import OptimizerConfig
from vapo.functional.columns import on_device
from vapo.training.optimizers import clip_gradient, make_optimizer

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Operations(TorchDispatchMode):
    """The names of the operations in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else "")
        return func(*args, **(kwargs or {}))


def network(device: torch.device, num_layers: int = 3) -> nn.Module:
    return nn.ParameterList(torch.empty(4, 4, device=device) for _ in range(num_layers))


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_one_kernel_steps_all_parameters(device: torch.device) -> None:
    """A step that asked the GPU for its number would make the host wait, and raise here."""
    with FakeTensorMode():
        model = network(device)
        optimizer = make_optimizer(model, OptimizerConfig())
        steps = [state["step"] for state in optimizer.state.values()]
        assert {step.device.type for step in steps} == {device.type}
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        with Operations() as operations:
            optimizer.step()
    assert operations.names.count("_fused_adamw_") == 1
    assert not set(operations.names) & {"_local_scalar_dense", "_foreach_sqrt", "addcdiv_"}


def test_parameters_on_two_devices_are_stepped_by_torch_s_own_choice() -> None:
    with FakeTensorMode():
        model = nn.ModuleList([network(CPU), network(GPU)])
        optimizer = make_optimizer(model, OptimizerConfig())
    assert {group["fused"] for group in optimizer.param_groups} == {None}
    assert {state["step"].device for state in optimizer.state.values()} == {CPU}


def test_clipping_asks_the_gpu_for_nothing() -> None:
    with FakeTensorMode():
        model = network(GPU)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        with Operations() as operations:
            norm = clip_gradient(model, 1.0)
    assert norm.device.type == "cuda"
    assert "_local_scalar_dense" not in operations.names


def test_a_gpu_fetches_what_is_pinned_and_the_host_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        calls.append("pinned")
        return tensor

    def to(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        calls.append((device.type, non_blocking))
        return torch.empty_like(tensor, device=device)  # torch without CUDA copies none

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    with FakeTensorMode():
        moved = on_device(torch.empty(3), GPU)
        assert calls == ["pinned", ("cuda", True)]
        assert moved.device.type == "cuda"
        calls.clear()
        on_device(moved, GPU)
        on_device(torch.empty(3), CPU)
    assert calls == [("cuda", False), ("cpu", False)], "nothing else is pinned"
