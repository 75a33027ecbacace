"""Records into one MLflow run, and what an error of the store means for a record."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo.tracking.delivery import OutageError, RefusedError
from vapo.tracking.metric_groups import stored_key
from vapo.tracking.records import NOTE_TAG, Record, with_score

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_MAX_PARAM_CHARS = 6000


class MlflowSink:
    """Writes records to one MLflow run."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def send(self, records: Sequence[Record]) -> None:
        """Raises: OutageError if the store does not answer, or does not have the run any more;
        RefusedError if the record is to blame; else what MLflow raises."""
        try:
            self._send(records)
        except Exception as error:
            reason, run = str(error) or type(error).__name__, None
            with suppress(Exception):
                run = active_run(self._client, self._run_id)
            if run is None:
                raise OutageError(reason) from error
            if is_of_record(error):
                raise RefusedError(reason) from error
            raise

    def _send(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

        client, run_id = self._client, self._run_id
        kind, payload, name = records[0].kind, records[0].payload, records[0].name
        if kind == "metrics":
            points = [point for record in records for point in record.payload]
            metrics = [Metric(stored_key(key), *values) for key, *values in points]
            client.log_batch(run_id, metrics=metrics)
        elif kind == "params":
            params = [Param(key, value[:_MAX_PARAM_CHARS]) for key, value in payload.items()]
            client.log_batch(run_id, params=params)
        elif kind == "tags":
            client.log_batch(run_id, tags=[RunTag(*item) for item in payload.items()])
        elif kind == "note":  # what a user wrote into it meanwhile stays
            before = client.get_run(run_id).data.tags.get(NOTE_TAG, "")
            client.set_tag(run_id, NOTE_TAG, with_score(before, payload))
        elif kind == "inputs":
            inputs = []
            for data, context, digest, num_rows, source in payload:
                profile = json.dumps({"num_rows": num_rows})
                dataset = Dataset(data, digest, "local", source, profile=profile)
                inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
            client.log_inputs(run_id, datasets=inputs)
        elif kind == "file":
            folder, _, file_name = name.rpartition("/")
            with tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary) / file_name
                path.write_bytes(payload)
                client.log_artifact(run_id, str(path), folder or None)
        elif payload[0] == "RUNNING":
            client.update_run(run_id, "RUNNING")
        else:
            client.set_terminated(run_id, payload[0], end_time=payload[1])


def active_run(client: MlflowClient, run_id: str) -> Run | None:
    """None where a store that answers has no such run, or has it among its deleted ones.

    Raises: MlflowException if the store does not answer.
    """
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def is_of_record(error: Exception) -> bool:
    """Whether a store that answers says that the record is invalid, or too large for it."""
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    is_invalid = getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE"
    is_too_large = status == 413 or "failed with error code 413 " in str(error)
    return is_invalid or is_too_large or isinstance(error, UnicodeError)
