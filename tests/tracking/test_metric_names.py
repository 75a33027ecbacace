"""A metric has one name in MLflow, code and docs; an older version's names are still read."""

from __future__ import annotations

from pathlib import Path

from mlflow import MlflowClient

from tests.tracking.metric_docs import documented_keys
from tests.tracking.trouble import client_of
from vapo.config.schema import TrackingConfig
from vapo.sweep.report.rows import make_recorded_run
from vapo.tracking.logger import RunLogger
from vapo.tracking.metric_names import (
    RENAMED,
    by_present_name,
    present_name,
    recorded_metrics,
    stored_names,
)
from vapo.tracking.stores import locate_store

METRICS = {"eval/avg_at_k": 0.5, "time/rollout_s": 2.0, "rollout/num_response_tokens": 7.0}
OLD = {"_score/avg_at_k": 0.25, "system/time/rollout_s": 1.0, "z_rollout/num_tokens": 6.0}


def test_every_metric_is_its_own_name_and_the_renamed_ones_are_gone() -> None:
    keys = documented_keys()
    assert {present_name(key) for key in keys} == keys
    assert not RENAMED.keys() & keys
    assert set(RENAMED.values()) <= keys
    mlflows = {"system/cpu_utilization_percentage", "sft/loss", "critic_NAME/best", "z_mine/x"}
    assert {present_name(key) for key in mlflows} == mlflows


def test_every_documented_key_is_found_under_the_prefix_that_it_had() -> None:
    assert present_name("_score_gsm8k/avg_at_k") == "eval_gsm8k/avg_at_k"
    for group in ("eval", "eval_gsm8k", "actor", "critic", "rollout", "advantage", "faults",
                  "progress", "watch"):  # fmt: skip
        assert present_name(f"z_{group}/x") == f"{group}/x"
    for group in ("time", "throughput", "memory"):
        assert present_name(f"system/{group}/x") == f"{group}/x"


def test_a_run_of_an_older_version_goes_on_under_the_present_names(
    own_store: TrackingConfig, tmp_path: Path
) -> None:
    """Its record, its latest values and its score are read as one, whichever version wrote them."""
    journal = tmp_path / "tracking"
    with RunLogger(own_store, run_name="x", journal=journal) as first:
        first.log_metrics({"rollout/num_tokens": 6.0}, step=1)
    client: MlflowClient = client_of(own_store)
    run_id = str(first.run_id)
    for key, value in OLD.items():
        client.log_metric(run_id, key, value, step=1)
    assert make_recorded_run(client.get_run(run_id)).score == 0.25
    with RunLogger(own_store, run_name="x", run_id=run_id, journal=journal) as again:
        assert again.recorded_steps["rollout/num_response_tokens"] == 1
        again.log_metrics(METRICS, step=2)
    run = client.get_run(run_id)
    assert run.data.metrics.keys() >= METRICS.keys()
    assert by_present_name(run.data.metrics) == METRICS
    assert make_recorded_run(run).score == 0.5
    assert stored_names(run.data.metrics, "time/rollout_s") == [
        "system/time/rollout_s", "time/rollout_s",
    ]  # fmt: skip
    found = recorded_metrics(locate_store(own_store.uri), run_id)
    assert found["eval/avg_at_k"] == [(1, 0.25), (2, 0.5)]
    assert found["time/rollout_s"] == [(1, 1.0), (2, 2.0)]
