"""A run in the precision that its processor decides, with both answers on every processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.commands import summary
from tests.integration.test_algorithms import folder, tiny_fit
from vapo.networks import precision
from vapo.runs.checkpoints import read_checkpoint

__all__ = ["folder"]


@pytest.mark.slow
@pytest.mark.parametrize("is_fast", [True, False])
def test_a_run_takes_the_precision_of_its_processor(
    is_fast: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fast bfloat16 the engine samples from a copy whose weights are bfloat16."""
    monkeypatch.setattr(precision, "cpu_has_bfloat16_products", lambda: is_fast)
    monkeypatch.setattr(precision, "LEAST_WIDTH", 1)
    run = tiny_fit("vapo", folder, monkeypatch, "training.max_staleness=1")
    expected = "bf16-mixed" if is_fast else "32-true"
    assert f"precision: {expected}" in (run / "config.yaml").read_text()
    assert summary(run)["num_iterations"] == 3
    weights = read_checkpoint(run / "checkpoints/last.ckpt")["state_dict"].values()
    assert {str(weight.dtype) for weight in weights if weight.is_floating_point()} == {
        "torch.float32"
    }
