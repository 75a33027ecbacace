"""MLflow's keys of metrics: which groups come first, and that every key is found again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mlflow import MlflowClient

from tests.tracking.metric_docs import documented, documented_keys
from tests.tracking.trouble import client_of
from vapo.config.schema import TrackingConfig
from vapo.tracking.logger import RunLogger
from vapo.tracking.metric_groups import documented_key, stored_key


def groups(keys: Iterable[str]) -> list[str]:
    """In the order in which MLflow's UI shows them: `_`, then letters whatever their case."""
    found = {stored_key(key).rpartition("/")[0] for key in keys}
    return sorted((group for group in found if not group.startswith("system/")), key=str.lower)


def test_the_score_comes_first_and_what_only_experts_read_last() -> None:
    keys = [key for key in documented_keys() if "_NAME" not in key]
    shown = groups(keys)
    assert shown[0] == "_score"
    last = [group.startswith("z_") for group in shown]
    assert last == sorted(last)
    assert {stored_key(f"eval/{name}") for name in ("avg_at_k", "pass_at_k", "maj_at_k")} == {
        key for key in map(stored_key, keys) if key.startswith("_score/")
    }
    assert stored_key("eval/avg_at_k_ci_low") == "z_eval/avg_at_k_ci_low"
    assert stored_key("time/rollout_s") == "system/time/rollout_s"
    assert stored_key("eval_gsm8k/avg_at_k") == "_score_gsm8k/avg_at_k"
    assert stored_key("eval_gsm8k/num_prompts") == "z_eval_gsm8k/num_prompts"
    assert stored_key("sft/loss") == "sft/loss"
    assert stored_key("critic_NAME/heldout_explained_variance").startswith("critic_NAME/")


def test_every_documented_key_is_found_again_and_is_no_other_ones() -> None:
    keys = documented_keys()
    stored = {stored_key(key): key for key in keys}
    assert len(stored) == len(keys)
    assert documented(dict.fromkeys(stored, 0.0)).keys() == keys
    assert documented_key("system/cpu_utilization_percentage") == (
        "system/cpu_utilization_percentage"
    ), "MLflow's own"


METRICS = {"eval/avg_at_k": 0.5, "time/rollout_s": 2.0, "actor/entropy": 1.0}


def test_a_resumed_run_keeps_its_names(own_store: TrackingConfig, tmp_path: Path) -> None:
    journal = tmp_path / "tracking"
    with RunLogger(own_store, run_name="x", journal=journal) as first:
        first.log_metrics(METRICS, step=1)
    client: MlflowClient = client_of(own_store)
    with RunLogger(own_store, run_name="x", run_id=first.run_id, journal=journal) as again:
        assert dict(again.recorded_steps) == dict.fromkeys(METRICS, 1)
        again.log_metrics(METRICS, step=2)
    expected = set(map(stored_key, METRICS))
    assert set(client.get_run(str(first.run_id)).data.metrics) == expected
    for key in expected:
        history = client.get_metric_history(str(first.run_id), key)
        assert [point.step for point in history] == [1, 2]
