"""The view of an experiment: a tag that MLflow's UI reads, set once and where it is missing."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from mlflow import MlflowClient
from mlflow.entities import Experiment, ExperimentTag
from mlflow.exceptions import MlflowException

from tests.tracking.metric_docs import documented_keys
from tests.tracking.ready_stores import ready_store
from vapo.tracking.opening import open_store
from vapo.tracking.shared_view import VIEW_TAG, share_view, view_state
from vapo.tracking.stores import locate_store


def test_scores_are_the_first_columns_and_charts() -> None:
    state = json.loads(view_state())
    before, after, critic = (
        f"metrics.`{name}`"
        for name in ("eval/avg_at_k_before", "eval/avg_at_k", "critic/explained_variance")
    )
    assert state["selectedColumns"] == state["columnOrder"] == [before, after, critic]
    charts = state["compareRunCharts"]
    assert [chart["metricKey"] for chart in charts] == [
        "eval/avg_at_k",
        "rollout/reward_mean",
        "critic/explained_variance",
        "rollout/response_length_mean",
        "critic/value_loss",
    ]
    assert {chart["metricKey"] for chart in charts} | {"eval/avg_at_k_before"} <= documented_keys()
    (section,) = state["compareRunSections"]
    assert {chart["metricSectionId"] for chart in charts} == {section["uuid"]}
    assert len({chart["uuid"] for chart in charts}) == len(charts)
    assert len(view_state()) < 5000, "MLflow's limit of an experiment's tag"


def test_new_and_older_experiments_have_the_view(tmp_path: Path) -> None:
    store = locate_store(str(ready_store(tmp_path / "mlruns")))
    client = MlflowClient(store.uri)
    older = client.create_experiment("older")
    for name in ("new", "older"):
        experiment_id = open_store(store, name, lambda line: None)
        assert client.get_experiment(experiment_id).tags[VIEW_TAG] == view_state()
    assert experiment_id == older


@pytest.mark.parametrize(
    ("tag", "is_there", "num_writes"), [(view_state(), True, 0), ("{}", True, 1), (None, False, 1)]
)
def test_a_store_that_may_only_be_read_keeps_what_it_has(
    tag: str | None, is_there: bool, num_writes: int
) -> None:
    client = MagicMock(spec=MlflowClient)
    client.set_experiment_tag.side_effect = MlflowException("attempt to write a readonly database")
    tags = [] if tag is None else [ExperimentTag(VIEW_TAG, tag)]
    assert share_view(client, Experiment("1", "x", "here", "active", tags=tags)) == is_there
    assert client.set_experiment_tag.call_count == num_writes
