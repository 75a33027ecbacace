"""Runs whose critic is a probe: resumed, exported, from a file's rollouts, and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.commands import final_weights, output_options
from tests.integration.test_algorithms import (
    assert_resumes_alike,
    exported_critic,
    folder,
    tiny_fit,
    validate_with_page,
)
from tests.integration.test_stored_pretraining import BASE, data, run, stored_fit
from tests.recorded_metrics import metric_values
from tests.runs.comparing import assert_same
from vapo.networks.actor_critic import Actor
from vapo.rollouts.stored_rollouts import RolloutDataset
from vapo.runs.checkpoints import network_state, read_checkpoint

__all__ = ["data", "folder"]
OPTIONS = [
    "critic.kind=probe",
    "critic.init=policy",
    "critic.probe.layers=[-1,1]",
    "critic.probe.hidden_size=8",
    "critic.sampled_logprobs={}",
    "critic.epochs=2",
    "checkpoints.keep=9",
]


@pytest.mark.kills
def test_a_run_resumes_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_fit("vapo", folder, monkeypatch, *OPTIONS)
    assert_resumes_alike(folder, monkeypatch, *OPTIONS, whole=whole)


@pytest.mark.night  # tests/networks/test_probe.py saves and loads; a preset trains by day
def test_a_run_and_its_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_fit("vapo", folder, monkeypatch, *OPTIONS)
    checkpoint = whole / "checkpoints/last.ckpt"
    state = network_state(read_checkpoint(checkpoint), "critic")
    assert {name: list(weight.shape) for name, weight in state.items()} == {
        "model.layers.0.weight": [8, 192],
        "model.layers.0.bias": [8],
        "score.weight": [1, 8],
        "logprob_score.weight": [1, 10],
    }
    assert len(metric_values(whole, "critic/value_loss")) == 12
    assert load_file(whole / "pretrained_critic/model.safetensors").keys() == state.keys()
    found = validate_with_page(folder, checkpoint, *OPTIONS)
    assert "critic/explained_variance" in found
    exported = exported_critic(whole, folder / "exported")
    start = [*OPTIONS, f"critic.init={exported}", "training.num_iterations=0"]
    again = tiny_fit("vapo", folder, monkeypatch, *start)
    assert again.is_dir()


STORED = ("critic.kind=probe", "critic.init=policy", "critic.probe.layers=[-1,1]")


@pytest.mark.slow
def test_the_states_of_a_file_are_computed_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 groups of 4, 8 an iteration: two passes over 64 rows. 4 groups are held out."""
    rows: list[int] = []
    forward = Actor.forward

    def counted(self: Actor, inputs: Any, **options: Any) -> Any:
        rows.append(len(inputs.response_mask) if options.get("layers") else 0)
        return forward(self, inputs, **options)

    monkeypatch.setattr(Actor, "forward", counted)
    run = stored_fit(tmp_path, data, *STORED)
    assert sum(rows) == 80
    assert final_weights(run, "critic")["score.weight"].any()


@pytest.mark.kills  # by day a network on stored rollouts: test_stored_pretraining.py
def test_a_killed_run_has_the_same_states(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = RolloutDataset.batch

    def stops(self: RolloutDataset, index: int) -> Any:
        if index == 3:
            raise RuntimeError("killed")
        return batch(self, index)

    whole = stored_fit(tmp_path / "whole", data, *STORED)
    with monkeypatch.context() as patch:
        patch.setattr(RolloutDataset, "batch", stops)
        with pytest.raises(RuntimeError, match="killed"):
            stored_fit(tmp_path / "stopped", data, *STORED)
    resumed = stored_fit(tmp_path / "stopped", data, *STORED, "--ckpt_path", "last")
    assert_same(final_weights(resumed, "critic"), final_weights(whole, "critic"))


@pytest.mark.night  # tests/integration/test_critics_command.py compares networks
def test_a_comparison_has_probes_beside_networks(data: Path, tmp_path: Path) -> None:
    """And a probe's held-out explained variance is that of `vapo fit`, to the last bit."""
    grid, out = tmp_path / "grid.yaml", tmp_path / "out"
    probe = ["critic.kind=probe", "critic.init=policy"]
    overrides = "overrides: {critic.kind: probe, critic.init: policy}"
    grid.write_text(f"full_system: network\nrows: [{{row: network}}, {{row: probe, {overrides}}}]")
    heldout = "components.value_pretraining.heldout_share=0.2"
    files = ["--rollouts", str(data), "--grid", str(grid), "--seeds", "0"]
    run("critics", *BASE, *output_options(tmp_path), *files, "--output_dir", str(out), heldout)
    curves = json.loads((out / "curves.json").read_text())
    assert [curve["critic"] for curve in curves] == ["network", "probe"]
    run_dir = stored_fit(tmp_path, data, *probe, "components.value_pretraining.num_iterations=2")
    callbacks = read_checkpoint(run_dir / "checkpoints/last.ckpt")["callbacks"]
    [state] = [state for name, state in callbacks.items() if name.startswith("ValuePretraining")]
    assert curves[1]["points"][-1][3] == state["best"]
