"""Runs whose critic is adapters on the actor's base: resumed, exported and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.commands import output_options
from tests.integration.test_algorithms import (
    assert_resumes_alike,
    exported_critic,
    folder,
    tiny_fit,
    validate_with_page,
)
from tests.integration.test_stored_pretraining import BASE, data, run, stored_fit
from tests.recorded_metrics import metric_values
from vapo.runs.checkpoints import network_state, read_checkpoint

__all__ = ["data", "folder"]
ADAPTERS = [
    *("critic.kind=adapters", "critic.init=policy", "critic.lora.rank=2", "actor.lora.rank=2"),
    *("critic.optimizer.lr=1e-2", "actor.optimizer.lr=1e-3"),
]
OPTIONS = [
    *ADAPTERS,
    "critic.prompt.kind=privileged",
    "critic.prompt.template='{answer}{prompt}'",
    "algorithm.kl.coef=0.01",
    "actor.gradient_checkpointing=true",
    "critic.gradient_checkpointing=true",
    "critic.epochs=2",
    "checkpoints.keep=9",
]


@pytest.mark.kills
def test_a_run_resumes_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_fit("vapo", folder, monkeypatch, *OPTIONS)
    assert_resumes_alike(folder, monkeypatch, *OPTIONS, whole=whole)


@pytest.mark.night  # tests/networks/test_adapters.py saves and loads; a preset trains by day
def test_a_run_and_its_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_fit("vapo", folder, monkeypatch, *OPTIONS)
    checkpoint = whole / "checkpoints/last.ckpt"
    contents = read_checkpoint(checkpoint)
    state = network_state(contents, "critic")
    assert all(".lora_" in name or name == "score.weight" for name in state)
    assert sum("embed_tokens" in name for name in contents["state_dict"]) == 1
    assert all(tensor.any() for tensor in state.values())
    assert len(metric_values(whole, "critic/value_loss")) == 12
    assert load_file(whole / "pretrained_critic/model.safetensors").keys() == state.keys()
    exported = exported_critic(whole, folder / "exported")
    for path in (whole / "pretrained_critic", exported):
        assert json.loads((path / "config.json").read_text())["actor_fingerprint"]
    found = validate_with_page(folder, checkpoint, *OPTIONS)
    assert "critic/explained_variance" in found
    start = [*OPTIONS, f"critic.init={exported}", "training.num_iterations=0"]
    again = tiny_fit("vapo", folder, monkeypatch, *start)
    assert again.is_dir()


@pytest.mark.night
def test_a_comparison_has_adapters_beside_networks(data: Path, tmp_path: Path) -> None:
    """And their held-out explained variance is that of `vapo fit`, to the last bit."""
    grid, out = tmp_path / "grid.yaml", tmp_path / "out"
    overrides = dict(option.split("=") for option in ADAPTERS)
    rows = [{"row": "network"}, {"row": "adapters", "overrides": overrides}]
    grid.write_text(json.dumps({"full_system": "network", "rows": rows}))
    heldout = "components.value_pretraining.heldout_share=0.2"
    files = ["--rollouts", str(data), "--grid", str(grid), "--seeds", "0"]
    run("critics", *BASE, *output_options(tmp_path), *files, "--output_dir", str(out), heldout)
    curves = json.loads((out / "curves.json").read_text())
    assert [curve["critic"] for curve in curves] == ["network", "adapters"]
    length = "components.value_pretraining.num_iterations=2"
    run_dir = stored_fit(tmp_path, data, *ADAPTERS, length)
    callbacks = read_checkpoint(run_dir / "checkpoints/last.ckpt")["callbacks"]
    [state] = [state for name, state in callbacks.items() if name.startswith("ValuePretraining")]
    assert curves[1]["points"][-1][3] == state["best"]
    assert state["best"] != curves[1]["points"][0][3], "it was trained"
