"""Two critics through the real job: saved, exported, started from, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.test_algorithms import (
    assert_resumes_alike,
    folder,
    tiny_fit,
    validate_with_page,
)
from tests.recorded_metrics import metric_values
from tests.tracking.metric_docs import documented_keys
from vapo.commands.export import run as export
from vapo.errors import UserError
from vapo.runs.checkpoints import network_state, read_checkpoint

__all__ = ["folder"]
OPTIONS = [
    "critic.count=2",
    "algorithm.agreement_mask_share=0.2",
    "algorithm.disagreement_mask_share=0.2",
    "algorithm.entropy_coef=0.001",
    "checkpoints.keep=9",
]


@pytest.mark.kills  # test_composite_resume.py has two critics among all that resumes
def test_a_run_resumes_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_fit("vapo", folder, monkeypatch, *OPTIONS)
    assert_resumes_alike(folder, monkeypatch, *OPTIONS, whole=whole)


@pytest.mark.night  # test_a_run_of_everything_resumes_in_either_phase has two critics
def test_a_run_and_its_folders(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_fit("vapo", folder, monkeypatch, *OPTIONS)
    expected = read_checkpoint(whole / "checkpoints/last.ckpt")
    last, second = (whole / "checkpoints" / name for name in ("last.ckpt", "iteration_000002"))
    spreads = metric_values(whole, "critic/value_spread")
    assert spreads[0] == 0 < min(spreads[1:]), "members start alike"
    masked = metric_values(whole, "critic/agreement_masked_share")
    assert masked == pytest.approx([0.2, 0.2], abs=0.02), "in the policy phase"
    of_entropy = metric_values(whole, "critic/disagreement_masked_share")
    assert of_entropy == pytest.approx([0.2, 0.2], abs=0.02)
    logged = {"value_spread", "agreement_masked_share", "disagreement_masked_share"}
    assert {f"critic/{name}" for name in logged} <= documented_keys()
    with pytest.raises(UserError, match=r"has 2 critics, and critic\.count is 1"):
        tiny_fit("vapo", folder, monkeypatch, ckpt_path=second)

    # what value pretraining saved starts another run; an export is alike, of the last weights
    saved = whole / "pretrained_critic"
    start = [f"critic.init={saved}", "components.value_pretraining.enabled=false", *OPTIONS]
    other = tiny_fit("vapo", folder, monkeypatch, *start)
    assert metric_values(other, "critic/value_spread")[0] > 0, "they have diverged already"
    export(last, tmp_path / "exported", "critic")
    for member in ("0", "1"):
        exported = load_file(tmp_path / "exported" / member / "model.safetensors")
        state = network_state(expected, "critic", member=int(member))
        assert exported.keys() == state.keys()
        assert all(torch.equal(exported[name], state[name]) for name in state)
        pretrained = load_file(saved / member / "model.safetensors")
        assert any(not torch.equal(pretrained[name], state[name]) for name in state)

    assert validate_with_page(folder, last, *OPTIONS)["critic/value_spread"] > 0
