"""Runs and products on a CUDA device (`make gpu`): what the CPU's tests check, where it computes.

Small networks, so that each run takes seconds; `trainer.precision` is given, since a policy of this
width would compute in float32.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.commands import SHORTEST, fit, summary
from tests.recorded_metrics import metric_points
from tests.runs.comparing import assert_same
from vapo.functional.logprobs import output_logits, token_logprobs
from vapo.runs.checkpoints import read_checkpoint

pytestmark = pytest.mark.gpu
MIXED = "trainer.precision=bf16-mixed"
FULL = "trainer.precision=32-true"
FSDP = "trainer.strategy=fsdp"
PRESETS = Path("conf/algorithm")


def gpu_fit(tmp_path: Path, *args: str, on: str = "gpu") -> Path:
    return fit(tmp_path, f"trainer.accelerator={on}", *args, small=SHORTEST)


def preset(name: str) -> tuple[str, ...]:
    return ("--config", str(PRESETS / f"{name}.yaml"))


def metrics(run: Path) -> dict[str, list[float]]:
    """Every metric's values, of the iterations in order."""
    return {key: [value for _, value in points] for key, points in metric_points(run).items()}


# ---- products -----------------------------------------------------------------------------------


def test_logits_of_bfloat16_weights_are_float32_sums() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(200, 576, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4001, 576, device="cuda", dtype=torch.bfloat16)
    exact = hidden.double() @ weight.double().T
    logits = output_logits(hidden, weight, on_cpu=False)
    assert logits.dtype == torch.float32
    assert float((logits - exact).abs().max()) < 1e-3
    coarse = (hidden @ weight.T).float()  # the control
    assert float((coarse - exact).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_and_their_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(50, 64, device="cuda", dtype=dtype)
    weight = torch.randn(1003, 64, device="cuda", dtype=dtype) / 4
    targets = torch.randint(1003, (50,), device="cuda")

    def gradients(states: Any, head: Any, *, own: bool) -> tuple[Any, ...]:
        states, head = (x.detach().requires_grad_() for x in (states, head))
        if own:
            found = token_logprobs(states, head, targets, temperature=0.7, chunk_size=16)[0]
        else:
            found = (states @ head.T / 0.7).log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
        return found.detach(), *torch.autograd.grad(found.sum(), [states, head])

    exact = gradients(hidden.double(), weight.double(), own=False)
    found = gradients(hidden, weight, own=True)
    bound = 1e-5 if dtype is torch.float32 else 1e-2  # a gradient has its input's dtype
    assert float((found[0] - exact[0]).abs().max()) < 1e-4
    for own, reference in zip(found[1:], exact[1:], strict=True):
        assert float((own - reference).norm() / reference.norm()) < bound


def test_mixed_precision_multiplies_the_output_layer_in_bfloat16() -> None:
    """The inputs are rounded as autocast would round them; sums and results are not."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 576, device="cuda") for n in (200, 4001))
    rounded = [x.bfloat16().double() for x in (hidden, weight / 8)]
    with torch.autocast("cuda", torch.bfloat16):
        logits = output_logits(hidden, weight / 8, on_cpu=False)
    assert logits.dtype == torch.float32
    assert float((logits - rounded[0] @ rounded[1].T).abs().max()) < 1e-4
    plain = output_logits(hidden, weight, on_cpu=False)
    assert float((plain - hidden.double() @ weight.double().T).abs().max()) < 1e-3


# ---- runs ---------------------------------------------------------------------------------------


def test_a_float32_run_has_the_numbers_of_a_cpu(tmp_path: Path) -> None:
    """Draws are the host's, so that the same tokens are sampled; updates agree to rounding."""
    on_cpu, on_gpu = (metrics(gpu_fit(tmp_path / on, FULL, on=on)) for on in ("cpu", "gpu"))
    assert on_gpu["memory/gpu_reserved_gib"][0] >= on_gpu["memory/gpu_gib"][0] > 0
    keys = ("rollout/reward_mean", "rollout/response_length_mean")
    for key in (*keys, "critic/value_loss", "actor/grad_norm"):
        assert on_gpu[key][0] == pytest.approx(on_cpu[key][0], rel=1e-3), key


@pytest.mark.parametrize("options", [(FULL,), (MIXED,), (MIXED, "training.max_staleness=1")])
def test_engine_and_trainer_agree(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = metrics(gpu_fit(tmp_path, *options))
    assert max(found["rollout/logprob_gap_mean"]) < (1e-4 if FULL in options else 0.02)
    assert all(map(torch.isfinite, torch.tensor(found["actor/policy_loss"])))


@pytest.mark.parametrize("name", ["sao", "probe", "adapters", "grpo", "hl_gauss"])
def test_a_preset_trains(tmp_path: Path, name: str) -> None:
    run = gpu_fit(tmp_path, *preset(name), MIXED)
    found = metrics(run)
    assert len(found["progress/iteration"]) == summary(run)["num_iterations"]
    assert all(map(torch.isfinite, torch.tensor(found["actor/grad_norm"])))


@pytest.mark.parametrize(
    "options",
    [(MIXED,), (FSDP, MIXED), (FSDP, FULL, "trainer.cpu_offload=true")],
    ids=["one device", "fsdp", "offload"],
)
def test_a_resumed_run_ends_as_the_whole_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    options = (*options, "checkpoints.every_n_iterations=1", "checkpoints.keep=9")
    whole = gpu_fit(tmp_path / "whole", *options)
    copy = tmp_path / whole.name  # a resumed run goes on in its own folder
    shutil.copytree(whole, copy, symlinks=True)
    shutil.rmtree(copy / "checkpoints/iteration_000003")
    second = copy / "checkpoints/iteration_000002"
    resumed = gpu_fit(tmp_path / "resumed", *options, "--ckpt_path", str(second))
    assert resumed == copy
    expected, actual = (read_checkpoint(r / "checkpoints/last.ckpt") for r in (whole, resumed))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert_same(actual[part], expected[part], part)
