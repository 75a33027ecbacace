"""Writes records into one MLflow run, and classifies the errors of the store."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vapo.tracking.confirming import missing_records
from vapo.tracking.delivery import OutageError, RefusedError
from vapo.tracking.records import NOTE_TAG, Record, with_score

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run

_MAX_PARAM_CHARS = 6000
# codes of MLflow that say nothing about the record
_OUTAGE_CODES = (
    "TEMPORARILY_UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "REQUEST_LIMIT_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "CUSTOMER_UNAUTHORIZED",
    "RESOURCE_DOES_NOT_EXIST",
    "ENDPOINT_NOT_FOUND",
    "ABORTED",
    "CANCELLED",
)


class MlflowSink:
    """Writes records to one MLflow run, as `Delivery` needs it."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def send(self, records: Sequence[Record]) -> None:
        """Write records to the run.

        Raises: OutageError: the store's state causes the failure, or the run was deleted.
            RefusedError: the record causes it. Any other error is MLflow's own, of unknown cause.
        """
        try:
            self._send(records)
        except Exception as error:
            reason = str(error) or type(error).__name__
            fault, run = fault_of(error), None
            if fault != "store":
                with suppress(Exception):
                    run = active_run(self._client, self._run_id)
            if run is None:
                raise OutageError(reason) from error
            if fault == "record":
                raise RefusedError(reason) from error
            raise

    def missing(self, records: Sequence[Record]) -> list[Record]:
        """Return those of the records that the store does not have (see `missing_records`)."""
        return missing_records(self._client, self._run_id, records)

    def _send(self, records: Sequence[Record]) -> None:
        """Write records of one kind to the run, by MLflow's method for that kind."""
        from mlflow.entities import Metric, Param, RunTag

        client, run_id = self._client, self._run_id
        kind, payload, name = records[0].kind, records[0].payload, records[0].name
        if kind == "metrics":
            metrics = [Metric(*item) for record in records for item in record.payload]
            client.log_batch(run_id, metrics=metrics)
        elif kind == "params":
            params = [Param(key, value[:_MAX_PARAM_CHARS]) for key, value in payload.items()]
            client.log_batch(run_id, params=params)
        elif kind == "tags":
            client.log_batch(run_id, tags=[RunTag(*item) for item in payload.items()])
        elif kind == "note":  # what a user wrote into it meanwhile stays
            old_note = client.get_run(run_id).data.tags.get(NOTE_TAG, "")
            client.set_tag(run_id, NOTE_TAG, with_score(old_note, payload))
        elif kind == "inputs":
            client.log_inputs(run_id, datasets=[_dataset(*data) for data in payload])
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


def _dataset(name: str, context: str, digest: str, num_rows: int, source: str) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    profile = json.dumps({"num_rows": num_rows})
    dataset = Dataset(name, digest, "local", source, profile=profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def active_run(client: MlflowClient, run_id: str) -> Run | None:
    """Return a run, or None if the store does not have it or has deleted it.

    Raises: MlflowException: the store does not answer.
    """
    run = known_run(client, run_id)
    return run if run is not None and is_active(run) else None


def is_active(run: Run) -> bool:
    """Whether a run is not deleted. (MLflow keeps deleted runs, which can be restored.)"""
    return bool(run.info.lifecycle_stage == "active")


def known_run(client: MlflowClient, run_id: str) -> Run | None:
    """Return a run, even a deleted one, or None if the store does not have it.

    Raises: MlflowException: the store does not answer.
    """
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def fault_of(error: BaseException) -> Literal["record", "store"] | None:
    """Return what causes an error: the record's content, or the store's state (full, away ...).

    It is None if that is not clear. If MLflow's server passes on the database's error, only its
    text shows it.
    """
    from requests import HTTPError
    from sqlalchemy.exc import InterfaceError, OperationalError, TimeoutError

    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    is_invalid = getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE"
    is_too_large = status == 413 or "failed with error code 413 " in str(error)
    if is_invalid or is_too_large or isinstance(error, UnicodeError):
        return "record"
    about_the_name = (HTTPError, IsADirectoryError, NotADirectoryError, FileNotFoundError)
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, (OperationalError, InterfaceError, TimeoutError)):
            return "store"
        if getattr(link, "error_code", None) in _OUTAGE_CODES:
            return "store"
        if isinstance(link, OSError):
            return None if isinstance(link, about_the_name) else "store"
        link = link.__cause__ or link.__context__
    return "store" if "OperationalError)" in str(error) else None
