"""Episodes of many turns: tugs of war are learnt, and their critic knows how a game stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.commands import store, summary, vapo_process

pytestmark = [pytest.mark.learning, pytest.mark.timeout(900)]


def test_vapo_learns_to_win(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    result = vapo_process(
        "fit",
        *("--config", "conf/tug_of_war/vapo.yaml"),
        *("training.num_iterations=4", "evaluation.every_n_iterations=4"),
        "evaluation.num_prompts=64",
        f"output_dir={tmp_path / 'runs'}",
        f"tracking.uri={store(tmp_path)}",
        timeout_s=850,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    contents = summary(Path(result.stdout.strip().splitlines()[-1]))
    assert contents["score_before"] < 0.45
    assert contents["score_after"] > contents["score_before"] + 0.25
    client = MlflowClient(f"sqlite:///{store(tmp_path)}/mlflow.db")
    key = "critic/explained_variance"
    history = client.get_metric_history(contents["mlflow_run_id"], key)
    known = [m.value for m in sorted(history, key=lambda m: m.step)]
    assert sum(known[-5:]) / 5 > 0.3, "the last of value pretraining, and those of the policy"
