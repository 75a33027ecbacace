"""The metrics of a recorded run, step by step."""

from __future__ import annotations

from vapo.tracking.metric_groups import documented_key
from vapo.tracking.stores import Store

MetricHistory = dict[str, list[tuple[int, float]]]


def recorded_metrics(store: Store, run_id: str) -> MetricHistory:
    """Key of docs/metrics.md -> (optimizer step, value), in order of the steps."""
    from mlflow import MlflowClient

    store.hand_over_credentials()
    client = MlflowClient(store.client_uri)
    return {
        documented_key(stored): sorted(
            (metric.step, metric.value) for metric in client.get_metric_history(run_id, stored)
        )
        for stored in sorted(client.get_run(run_id).data.metrics)
    }
