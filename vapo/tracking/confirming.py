"""Confirms that a store has the records which it said it took.

A store's answers alone prove nothing: MLflow answers every request with an empty object, and so
does a proxy in front of it that stores nothing. So the store is asked once, at the end of a run,
what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from posixpath import dirname
from typing import TYPE_CHECKING

from vapo.tracking.records import NOTE_TAG, Record

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def missing_records(client: MlflowClient, run_id: str, records: Sequence[Record]) -> list[Record]:
    """Return the records that the store does not have, in their order.

    Raises: MLflow's own errors: the store does not answer.
    """
    run = client.get_run(run_id)
    rows = _rows(client, run, records)
    files = _files(client, run_id, records)
    last_status = next((item for item in reversed(records) if item.kind == "status"), None)
    inputs = run.inputs.dataset_inputs if run.inputs else ()
    names = {item.dataset.name for item in inputs}

    def is_there(record: Record) -> bool:
        payload = record.payload
        if record.kind == "metrics":
            recorded_points = [item for item in payload if item[0] in rows]
            return all((at_ms, step) in rows[key] for key, _, at_ms, step in recorded_points)
        if record.kind == "params":
            return bool(payload.keys() <= run.data.params.keys())
        if record.kind == "tags":
            return bool(payload.keys() <= run.data.tags.keys())
        if record.kind == "note":
            return NOTE_TAG in run.data.tags
        if record.kind == "inputs":
            return {item[0] for item in payload} <= names
        if record.kind == "file":
            return record.name in files
        return record is not last_status or run.info.status == payload[0]

    return [record for record in records if not is_there(record)]


def _rows(
    client: MlflowClient, run: Run, records: Sequence[Record]
) -> dict[str, set[tuple[int, int]]]:
    """Return the (time, step) pairs that the store has of one metric of each record, by metric.

    All metrics of a record are sent in one request, so one of them stands for all.
    """
    rows: dict[str, set[tuple[int, int]]] = {}
    for record in records:
        if record.kind != "metrics" or any(item[0] in rows for item in record.payload):
            continue
        for key, *_ in record.payload[:1]:
            stored = client.get_metric_history(run.info.run_id, key)
            rows[key] = {(point.timestamp, point.step) for point in stored}
    return rows


def _files(client: MlflowClient, run_id: str, records: Sequence[Record]) -> set[str]:
    names = {record.name for record in records if record.kind == "file"}
    folders = {dirname(name) for name in names}
    return {
        file.path for folder in folders for file in client.list_artifacts(run_id, folder or None)
    }
