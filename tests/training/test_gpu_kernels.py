"""What the trainer asks of a GPU, on tensors that are on one by name and have no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.config.fits import STATE_TRACKING
from tests.judged import judged_batch
from tests.rollout_fixtures import make_rollouts
from tests.tiny_model import save_tiny_folder
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.config.networks import OptimizerConfig
from vapo.functional.columns import on_device
from vapo.functional.logprobs import token_logprobs
from vapo.networks import actor_critic
from vapo.networks.build import make_actor
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.networks.layouts import choose_layout
from vapo.networks.token_inputs import rollout_inputs
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


# ---- what is not computed, and not compiled -----------------------------------------------------


def forwards(path: str) -> Callable[..., Any]:
    config = load_config(FitConfig, STATE_TRACKING, [f"actor.path={path}"])
    actor = make_actor(config, None)
    layout = choose_layout("auto", [actor.model])

    def forward(number: int, **options: Any) -> Any:
        rollouts, verdicts = make_rollouts(number, vocab_size=30, seed=number)
        shaped: Any = {"rewards": config.rewards, "max_response_tokens": 32}
        batch = judged_batch(rollouts, verdicts, **shaped)
        if options:
            networks = ForwardNetworks(actor, None, None, 1.0, 64, 0, layout, CPU)
            return add_logprobs_and_values(batch, networks, **options)
        inputs = rollout_inputs(batch, range(number), pad_id=0, layout=layout)
        output = actor(inputs, temperature=1.0)
        output.logprobs.sum().backward()
        return output

    return forward


def test_no_shape_is_compiled(tmp_path: Path) -> None:
    """Attention is torch's own kernel, and nothing goes through a compiler, whatever the lengths
    are: an update of rows of new lengths compiles no graph."""
    forward = forwards(str(save_tiny_folder(tmp_path / "policy")))
    counters.clear()
    for number in (3, 5, 8):
        forward(number)
    assert not counters["stats"], "how many graphs torch has compiled"


@pytest.mark.slow
def test_the_count_sees_what_is_compiled() -> None:
    """The control of the test above."""
    counters.clear()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert counters["stats"]["unique_graphs"] == 1


def test_old_logprobs_come_without_entropies_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def noting(*args: Any, wants_entropy: bool, **options: Any) -> Any:
        asked.append(wants_entropy)
        return token_logprobs(*args, wants_entropy=wants_entropy, **options)

    monkeypatch.setattr(actor_critic, "token_logprobs", noting)
    forward = forwards(str(save_tiny_folder(tmp_path / "policy")))
    without, with_them = (forward(6, with_entropy=wants) for wants in (False, True))
    assert set(asked[: len(asked) // 2]) == {False}
    assert set(asked[len(asked) // 2 :]) == {True}
    assert without.old_entropy is None
    assert torch.equal(without.old_logprobs, with_them.old_logprobs)
    is_token = with_them.response_mask
    assert float(with_them.old_entropy[is_token].min()) > 0
