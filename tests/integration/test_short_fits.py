"""Runs of other sizes than the main job's: another critic, and one that is finished already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.integration.commands import (
    ROOT,
    SHORTEST,
    Result,
    final_weights,
    fit,
    summary,
    vapo,
)
from tests.recorded_metrics import metric_points


@pytest.mark.slow
def test_a_critic_of_another_size_is_trained_and_exported(tmp_path: Path) -> None:
    start = ROOT / "models" / "state_tracking" / "reward_model"
    config = AutoConfig.from_pretrained(start)
    config.intermediate_size //= 2
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "critic")
    AutoTokenizer.from_pretrained(start).save_pretrained(tmp_path / "critic")
    own = f"critic.init={tmp_path / 'critic'}"
    run = fit(tmp_path, own, "training.num_iterations=0", small=SHORTEST)
    folder = tmp_path / "exported"
    result = vapo("export", str(run / "checkpoints/last.ckpt"), str(folder), "--network", "critic")
    assert result.returncode == 0, result.stderr
    state = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    for name, tensor in final_weights(run, "critic").items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_go_on_with(tmp_path: Path) -> None:
    """Nothing is sampled, trained or recorded again; what a kill at the end left is removed.

    Value pretraining ends before its `num_iterations`, so that Lightning would continue by itself.
    """
    short = [
        "components.value_pretraining.num_iterations=2",
        "components.value_pretraining.stop_value_loss=100",
        "training.num_iterations=1",
    ]
    run = fit(tmp_path, *short, small=SHORTEST)
    last = (run / "checkpoints" / "last.ckpt").resolve()
    recorded = metric_points(run)["progress/iteration"]
    assert summary(run)["num_iterations"] == len(recorded) == 2
    left = run / "rollouts" / "iteration_000001_rank_0.parquet"
    left.touch()
    results: list[Result] = []

    def noting(*args: str) -> Result:
        results.append(vapo(*args))
        return results[0]

    again = fit(tmp_path, *short, "--ckpt_path", "last", small=SHORTEST, run=noting)
    assert again == run
    assert "raise training.num_iterations (1)" in results[0].stdout + results[0].stderr
    assert (run / "checkpoints" / "last.ckpt").resolve() == last
    assert metric_points(run)["progress/iteration"] == recorded
    assert not list((run / "rollouts").iterdir())
    assert summary(run)["score_after"] is not None
