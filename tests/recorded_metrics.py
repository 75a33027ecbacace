"""What a run recorded in MLflow, found by the run's folder alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from vapo.tracking.stores import locate_store

if TYPE_CHECKING:
    from mlflow import MlflowClient


def client_and_run_id(run: Path) -> tuple[MlflowClient, str]:
    """A client of the store that the run's config names, and the run's id in it."""
    from mlflow import MlflowClient

    config = yaml.safe_load((run / "config.yaml").read_text())
    run_id = json.loads((run / "run.json").read_text())["mlflow_run_id"]
    return MlflowClient(locate_store(config["tracking"]["uri"]).uri), run_id


def metric_points(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Every metric's (step, value) pairs, in the order of their arrival."""
    client, run_id = client_and_run_id(run)
    return {
        key: [(m.step, m.value) for m in client.get_metric_history(run_id, key)]
        for key in client.get_run(run_id).data.metrics
    }


def metric_values(run: Path, key: str) -> list[float]:
    """A metric's values in the order of their steps."""
    client, run_id = client_and_run_id(run)
    history = client.get_metric_history(run_id, key)
    return [m.value for m in sorted(history, key=lambda m: m.step)]
