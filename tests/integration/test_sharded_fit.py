"""Runs of two sharded processes, end to end: they train, resume and export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.commands import (
    SHORTEST,
    fit,
    initial_weights,
    summary,
    vapo,
    vapo_forked,
    vapo_on_two_ranks,
    vapo_under_srun,
)
from tests.recorded_metrics import metric_points
from vapo.runs.checkpoints import network_state, read_checkpoint


@pytest.mark.slow
def test_two_sharded_processes_train_resume_and_export(tmp_path: Path) -> None:
    """The FSDP strategy, end to end: engine and trainer agree, one resumed run, a whole export.

    First Lightning starts the second process, as a new interpreter; then srun has started both.
    """
    sharded = ["trainer.devices=2", "trainer.strategy=fsdp", "evaluation.every_n_iterations=100"]
    fit(tmp_path, *sharded, "training.num_iterations=1", run=vapo_forked, small=SHORTEST)
    run = fit(tmp_path, *sharded, "--ckpt_path", "last", run=vapo_under_srun, small=SHORTEST)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert summary(run)["num_iterations"] == 3
    assert (run / "pretrained_critic/model.safetensors").is_file()
    steps, gaps = zip(*metric_points(run)["rollout/logprob_gap_mean"], strict=True)
    assert steps == (2, 4)
    assert max(gaps) < 1e-5
    folder = tmp_path / "actor"
    result = vapo("export", str(run / "checkpoints/last.ckpt"), str(folder))
    assert result.returncode == 0, result.stderr
    exported = load_file(folder / "model.safetensors")
    start = initial_weights("actor")
    moved = [name for name, tensor in start.items() if not torch.equal(exported[name], tensor)]
    assert len(moved) == len(exported)


@pytest.mark.kills  # test_two_sharded_processes_train_resume_and_export resumes a sharded one
def test_an_unsharded_run_resumes_sharded(tmp_path: Path) -> None:
    """Counters and Adam's steps continue, and two small steps lie between the weights.

    Other numbers of sharded processes: tests/runs/test_two_processes.py.
    """
    common = [
        "trainer.strategy=fsdp",
        "components.value_pretraining.num_iterations=1",
        "evaluation.every_n_iterations=100",
        "actor.optimizer.lr=1e-5",
    ]
    one, two = ["trainer.strategy=auto"], ["trainer.devices=2"]
    run = fit(tmp_path, *common, *one, "training.num_iterations=1")
    before = read_checkpoint(run / "checkpoints/last.ckpt")
    again = fit(
        tmp_path,
        *common,
        *two,
        "training.num_iterations=2",
        "--ckpt_path",
        "last",
        run=vapo_on_two_ranks,
    )
    assert again == run
    after = read_checkpoint(run / "checkpoints/last.ckpt")
    steps = [int(contents["state_dict"]["policy_steps"]) for contents in (before, after)]
    assert steps == [2, 4]
    for name, tensor in network_state(before, "actor").items():
        moved = (network_state(after, "actor")[name] - tensor).abs().max()
        assert 0 < moved < 5e-5, name
    if "optimizer_states" in after:  # read from files only
        actor_states = after["optimizer_states"][0]["state"].values()
        assert {int(state["step"]) for state in actor_states} == {4}
