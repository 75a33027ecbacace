"""`experiments/gpu/training_steps.py`: its arithmetic on a made-up trace, and a tiny run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

GPU = Path(__file__).parents[2] / "experiments/gpu"


@pytest.fixture(autouse=True)
def gpu_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))


def tables() -> Any:
    return importlib.import_module("training_tables")


def trace() -> list[Any]:
    """Two stages, an optimizer's step within the second, and a call before and one after them."""
    operation = tables().Operation
    return [
        operation("aten::cat", 0, 1, host_us=1),
        operation("forward", 2, 10),
        operation("aten::mm", 3, 5, host_us=2, device_us=30),
        operation("cudaLaunchKernel", 4, 5, host_us=1),
        operation("update", 10, 40),
        operation("aten::mm", 11, 12, host_us=1, device_us=50),
        operation("aten::mul", 12, 13, host_us=4, device_us=20),
        operation("cudaStreamSynchronize", 14, 20, host_us=6),
        operation("Optimizer.step#AdamW.step", 30, 39),
        operation("aten::_fused_adamw_", 31, 33, host_us=3, device_us=7),
        operation("aten::_local_scalar_dense", 45, 46, host_us=1),
    ]


STAGES = {"forward": "passes", "update": "updates", "Optimizer.step#AdamW.step": "optimizers"}


def test_an_operation_counts_in_the_innermost_stage_in_which_it_began() -> None:
    found = tables().by_stage(trace(), STAGES)
    assert found["passes"].device_us == {"aten::mm": 30, "cudaLaunchKernel": 0}
    assert found["updates"].device_us["aten::mm"] == 50
    assert found["updates"].calls == {"aten::mm": 1, "aten::mul": 1, "cudaStreamSynchronize": 1}
    assert found["optimizers"].calls == {"aten::_fused_adamw_": 1}
    assert found["between"].calls == {"aten::cat": 1, "aten::_local_scalar_dense": 1}


def test_the_figures_of_a_stage() -> None:
    found = {name: own.record(2) for name, own in tables().by_stage(trace(), STAGES).items()}
    updates = found["updates"]
    assert (updates["host_ms"], updates["device_ms"]) == (0.011, 0.07)
    assert (updates["torch_calls"], updates["kernel_launches"]) == (2, 0)
    assert (updates["waits_for_the_device"], found["passes"]["kernel_launches"]) == (1, 1)
    assert found["between"]["host_reads"] == 1
    assert [o["operation"] for o in updates["by_device"]] == ["aten::mm", "aten::mul"]
    assert updates["by_device"][0] == {
        "operation": "aten::mm",
        "ms": 0.05,
        "calls": 1,
        "share": pytest.approx(50 / 70),
    }
    assert [o["operation"] for o in updates["by_host"]] == ["cudaStreamSynchronize", "aten::mul"]
    text = tables().operation_tables(found)
    assert "| updates | `aten::mm` | 0.1 | 71% | 1 |" in text
    assert "| passes | 0.0 | 0.0 | 1 | 1 | 0 | 0 |" in text


def test_tokens_operations_and_mfu_of_a_stage() -> None:
    """325e12 operations in 3.5 s are 92.9 TFLOP/s, 9.4 % of 989."""
    figures = tables().stage_figures(3.5, 164_352, 325e12, 989.0)
    assert figures["tokens_per_s"] == pytest.approx(46_957, abs=1)
    assert figures["tflops_per_s"] == pytest.approx(92.857, abs=0.001)
    assert figures["mfu"] == pytest.approx(0.09389, abs=1e-5)
    assert tables().stage_figures(3.5, 1.0, 1.0, None)["mfu"] is None
    text = tables().stage_table({"critic's update": figures})
    assert "| critic's update | 3.500 | 46,958 | 92.9 | 9.4% |" in text


def test_lengths_are_equal_or_drawn_and_the_same_each_time() -> None:
    lengths = tables().response_lengths
    assert lengths("equal", 3, 512) == [512, 512, 512]
    drawn = lengths("drawn", 400, 512)
    assert drawn == lengths("drawn", 400, 512)
    assert min(drawn) >= 32
    assert max(drawn) <= 512
    assert 262 <= sum(drawn) / 400 <= 282, "their mean is 272"


def test_operations_are_counted_with_the_bytes_of_their_operands() -> None:
    """[2, 3] @ [3, 4] in float32 has 24 + 48 + 32 bytes; a view moves none."""
    with importlib.import_module("counted_operations").Counting() as found:
        torch.ones(2, 3).view(3, 2).T @ torch.ones(3, 4)
    assert found.calls["mm"] == 1
    assert found.bytes["mm"] == 24 + 48 + 32
    assert not found.calls.keys() & {"view", "t", "transpose"}


@pytest.mark.slow
def test_a_tiny_run_prints_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    script = importlib.import_module("training_steps")
    script.main(["--toy", "--accelerator", "cpu", "--precision", "32-true", "--out", str(out)])
    found, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert found["stages"].keys() >= {"log-probs and values", "actor's update", "critic's update"}
    assert all(stage["seconds"] > 0 for stage in found["stages"].values())
    assert found["operations"]["actor's update"]["torch_calls"] > 500
    assert found["operations"]["optimizers"]["torch_calls"] > 0
    assert found["versions"].keys() >= {"torch", "transformers"}
    assert found["tokens"] == 8 * (6 + 40)
    assert "| critic's update |" in shown
