"""`vapo fit` ends itself: by a watcher, and by an actor or a critic that is not finite."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.config.fits import ON_STATE_TRACKING
from tests.integration.commands import ROOT, SHORT, fit, output_options, summary, vapo
from tests.recorded_metrics import client_and_run_id
from vapo.runs.checkpoints import read_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def stopped_fit(tmp_path: Path, *args: str) -> tuple[Path, str, str]:
    """A small fit that must stop itself: its folder, stdout and stderr."""
    where = output_options(tmp_path)
    result = vapo("fit", *ON_STATE_TRACKING, *SHORT, *where, *args)
    assert result.returncode == 3, result.stderr[-4000:]
    assert "Traceback" not in result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert result.stdout.strip().splitlines()[-1] == str(run)
    return run, result.stdout, result.stderr


@pytest.mark.night  # by day: tests/diagnostics/test_watchers.py, and a run that is stopped below
def test_a_watcher_stops_the_run(tmp_path: Path) -> None:
    limits = ["watch.approx_kl.limit=1e-9", "watch.approx_kl.patience=2"]
    run, out, err = stopped_fit(tmp_path, *limits, "watch.approx_kl.action=stop")
    assert "above watch.approx_kl.limit 1e-09 since iteration 3; likely: " in err
    assert f"checkpoint from before it: {run}/checkpoints/last.ckpt" in err
    assert out.count("watch: the policy moves far") == 1
    state = read_checkpoint(run / "checkpoints/last.ckpt")["state_dict"]
    assert int(state["iteration"]) == 2, "from before the first iteration beyond the limit"
    contents = summary(run)
    assert contents["status"] == "FAILED"
    assert contents["warnings"][0].startswith("the policy moves far from the one that sampled: ")
    assert "\nstopped       the policy moves far" in out
    client, run_id = client_and_run_id(run)
    recorded_run = client.get_run(run_id)
    assert recorded_run.info.status == "FAILED"
    assert recorded_run.data.tags["stopped"] == contents["stopped"]
    assert recorded_run.data.tags["watch/approx_kl"] == contents["warnings"][0]
    history = client.get_metric_history(run_id, "watch/approx_kl")
    assert [(m.step, m.value) for m in history] == [(2, 0.0), (4, 1.0)]
    again = fit(
        tmp_path, *limits, "--ckpt_path", "last", small=SHORT
    )  # it now warns, and runs to its end
    assert again == run
    assert summary(run)["status"] == "FINISHED"
    assert int(read_checkpoint(run / "checkpoints/last.ckpt")["state_dict"]["iteration"]) == 5


def test_an_actor_whose_logits_are_not_finite_stops_the_run(tmp_path: Path) -> None:
    """There is nothing to sample from; after an update, too, that made a weight infinite."""
    actor = tmp_path / "actor"
    shutil.copytree(ROOT / "models/state_tracking/policy", actor)
    weights = load_file(actor / "model.safetensors")
    weights["model.norm.weight"][:] = 3e38  # finite, as loading demands; its products are not
    save_file(weights, actor / "model.safetensors", {"format": "pt"})
    run, out, err = stopped_fit(tmp_path, f"actor.path={actor}")
    assert "vapo: the run stopped: the policy's logits after prompt " in err
    assert "are not finite: its weights have diverged (look at actor/grad_norm) or overflow" in err
    assert "there is no checkpoint from before it" in err
    contents = summary(run)
    assert contents["status"] == "FAILED"
    assert contents["stopped"].startswith("the policy's logits after prompt ")
    assert "\nstopped       the policy's logits" in out
    client, run_id = client_and_run_id(run)
    recorded_run = client.get_run(run_id)
    assert recorded_run.info.status == "FAILED"
    assert recorded_run.data.tags["stopped"] == contents["stopped"]


def test_a_critic_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    critic = tmp_path / "critic"
    shutil.copytree(ROOT / "models/state_tracking/reward_model", critic)
    weights = load_file(critic / "model.safetensors")
    weights["score.weight"][:] = 3e38  # finite, as loading demands; its products are not
    save_file(weights, critic / "model.safetensors", {"format": "pt"})
    run, out, err = stopped_fit(tmp_path, f"critic.init={critic}", "watch.max_bad_updates=3")
    reason = "old_values not finite in 32 of 32"
    assert "3 updates of the critic in a row were not finite (watch.max_bad_updates), " in err
    assert f"since iteration 1, step 1: {reason}; rollouts: {run}/bad_rollouts" in err
    assert "lower critic.optimizer.lr" in err
    assert out.count("update skipped") == 1
    assert summary(run)["faults"] == {"critic_updates_skipped": 3, "rollouts_left_out": 64}
    assert "faults        64 rollouts left out, 3 critic updates skipped" in out
    lines = (run / "bad_rollouts/rank0.jsonl").read_text().splitlines()
    assert len(lines) == 64
    first = json.loads(lines[0])
    assert first["not_finite"] == ["old_values"]
    assert first["where"] == "iteration 1"
    assert len(first["old_values"]) == len(first["response_ids"])
    assert {str(value) for value in first["old_values"]} <= {"nan", "inf", "-inf"}
    assert len(first["response"]) > 0
    client, run_id = client_and_run_id(run)
    recorded_run = client.get_run(run_id)
    assert recorded_run.info.status == "FAILED"
    key = "faults/critic_updates_skipped"
    history = client.get_metric_history(run_id, key)
    assert [(m.step, m.value) for m in history] == [(-2, 2.0)]
