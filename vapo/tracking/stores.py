"""Where runs are recorded: from `tracking.uri` to a store that answers."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from vapo.config.secret_variables import TRACKING_PASSWORD, TRACKING_URI, TRACKING_USER
from vapo.errors import UserError
from vapo.tracking.credentials import Address, check_server, completed
from vapo.tracking.delivery import OutageError, RefusedError
from vapo.tracking.records import InputData, Record
from vapo.tracking.store_errors import (
    active_run,
    is_outage,
    is_records_fault,
    quiet_stores,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

DATABASE_NAME = "mlflow.db"
_MAX_PARAMS = 100
_MAX_METRICS = 1000
_MAX_PARAM_CHARS = 6000
_PING = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
# MLflow's own retries would hold a request for minutes; `delivery` tries again instead.
_RUN = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


@dataclass(frozen=True)
class Store(Address):
    """An MLflow store. `database` is its SQLite file, None for any other kind."""

    database: Path | None = None

    @property
    def artifact_location(self) -> str | None:
        """Beside the database; None leaves the choice to the server."""
        return (self.database.parent / "artifacts").as_uri() if self.database else None

    def artifact_folder(self, run_id: str | None, name: str) -> Path | None:
        """Where a run's artifacts of this name lie, where they lie beside the database."""
        if self.database is None or run_id is None:
            return None
        return self.database.parent / "artifacts" / run_id / "artifacts" / name


def locate_store(uri: str) -> Store:
    """A folder (or `file:` URI) means `mlflow.db` inside it; every other URI is taken as is.

    One without credentials gets those of MLFLOW_TRACKING_URI, if that is of the same store.

    Raises: UserError for a URI that is empty, or a server's that cannot be read.
    """
    uri = completed(uri)
    if not uri.strip():
        raise UserError("tracking.uri is empty: give a folder, as mlruns, or an MLflow URI")
    if uri.startswith("file:"):
        return locate_store(unquote(urlsplit(uri).path))
    if match := re.match(r"sqlite:///(.+)", uri):
        return Store(uri, Path(match[1].partition("?")[0]).absolute())
    if uri.startswith(("http://", "https://")):
        check_server(uri)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", uri) or uri in ("databricks", "databricks-uc"):
        return Store(uri)
    database = Path(uri).expanduser().absolute() / DATABASE_NAME
    return Store(f"sqlite:///{database}", database)


def open_store(store: Store, experiment: str, note: Callable[[str], None]) -> str:
    """The id of the experiment in a store that answers; both are made if they are missing.

    Raises: UserError within seconds if the store cannot be written or does not answer.
    """
    with _only_one_opener(store):
        if store.database and not store.database.exists():
            note(f"creating the tracking store {store.database} (about 10 seconds, once)")
        with _client_without_patience(store) as client:
            return _experiment_id(client, experiment, store.artifact_location)


def begin_run(
    store: Store,
    experiment_id: str,
    earlier: str | None,
    name: str | None,
    tags: Mapping[str, str],
) -> tuple[MlflowClient, Run]:
    """The run `earlier`; a new one where there is none, or where the store has lost it.

    Raises: UserError if the store gives neither.
    """
    from mlflow import MlflowClient, set_tracking_uri
    from mlflow.exceptions import MlflowException
    from mlflow.tracking.context.registry import resolve_tags

    set_tracking_uri(store.client_uri)  # what a client does with artifacts asks for it
    client = MlflowClient(store.client_uri)
    try:
        if earlier and (run := active_run(client, earlier)):
            return client, run
        ours_and_mlflows = resolve_tags(dict(tags))  # MLflow's: who started what, and where
        return client, client.create_run(experiment_id, run_name=name, tags=ours_and_mlflows)
    except MlflowException as error:
        what = f"resume run {earlier}" if earlier else "begin a run"
        raise UserError(
            store.redact(f"tracking.uri: cannot {what} in {store.shown_uri}: {error}")
        ) from error


def client_of(store: Store, run_id: str) -> MlflowClient:
    """A client of a store that answers and has this run. Raises: UserError within seconds."""
    if store.database and not store.database.is_file():
        raise UserError(f"tracking_uri: there is no file {store.database}")
    with _client_without_patience(store) as client:
        if active_run(client, run_id):
            return client
    raise UserError(
        f"{store.shown_uri} has no run {run_id} any more: restore it if it was deleted, or "
        "resume the training with --ckpt_path, which sends its records to a new run"
    )


@contextmanager
def _client_without_patience(store: Store) -> Iterator[MlflowClient]:
    """Requests to a server fail after 5 seconds in here. Raises: UserError for what they raise."""
    quiet_stores()
    store.hand_over_credentials()
    before = {name: os.environ.get(name, value) for name, value in _RUN.items()}
    os.environ.update(_PING)
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield MlflowClient(store.client_uri)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise UserError(_startup_message(store, error)) from error
    finally:
        os.environ.update(before)


def _experiment_id(client: MlflowClient, name: str, artifact_location: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another run may have made it meanwhile
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"tracking.experiment: the experiment '{name}' was deleted in this store; restore it "
            "or choose another name"
        )
    return str(found.experiment_id)


def _startup_message(store: Store, error: Exception) -> str:
    reason = store.redact(" ".join(str(error).split()))
    reason = reason if len(reason) <= 300 else reason[:297] + "..."
    if store.is_http:
        names = f"{TRACKING_USER}, {TRACKING_PASSWORD}"
        mend = f"start the server, fix the address or its credentials ({names})"
    elif store.database:
        mend = "is it an MLflow database, written by this version of mlflow or an older one?"
    else:
        mend = f"fix the address; {TRACKING_URI} may hold it with its credentials"
    return (
        f"tracking.uri: no usable MLflow store at {store.shown_uri}: {reason}\n"
        f"  {mend}; or record locally with tracking.uri=mlruns"
    )


@contextmanager
def _only_one_opener(store: Store) -> Iterator[None]:
    """Runs started together wait for the one that creates the database's tables."""
    if store.database is None:
        yield
        return
    folder = store.database.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            lock = (folder / f".{store.database.name}.lock").open("w")
    except OSError as error:
        raise UserError(
            f"tracking.uri: cannot write in {folder}: {error.strerror}; choose another folder, "
            "as tracking.uri=mlruns"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class MlflowSink:
    """Writes records to one MLflow run."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def send(self, records: Sequence[Record]) -> None:
        """Raises: OutageError if the store's state is to blame, RefusedError if it is the record;
        else what MLflow raises. A run that is deleted is an outage, too."""
        try:
            self._send(records)
        except Exception as error:
            reason = str(error) or type(error).__name__
            if is_outage(error) or not self._has_run():
                raise OutageError(reason) from error
            if is_records_fault(error):
                raise RefusedError(reason) from error
            raise

    def _has_run(self) -> bool:
        try:
            return active_run(self._client, self._run_id) is not None
        except Exception:
            return False

    def _send(self, records: Sequence[Record]) -> None:
        first = records[0]
        if first.kind == "metrics":
            self._send_metrics([item for record in records for item in record.payload])
        elif first.kind == "params":
            self._send_params(first.payload)
        elif first.kind == "tags":
            for key, value in first.payload.items():
                self._client.set_tag(self._run_id, key, value)
        elif first.kind == "text":
            self._client.log_text(self._run_id, first.payload, first.name)
        elif first.kind == "bytes":
            self._send_bytes(first.payload, first.name)
        elif first.kind == "inputs":
            self._send_inputs(first.payload)
        elif first.kind == "status":
            self._send_status(*first.payload)
        elif not Path(first.payload).is_file():
            raise RefusedError(f"there is no file {first.payload}")
        else:
            self._client.log_artifact(self._run_id, str(first.payload), first.name or None)

    def _send_metrics(self, items: list[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        for start in range(0, len(items), _MAX_METRICS):
            metrics = [Metric(*item) for item in items[start : start + _MAX_METRICS]]
            self._client.log_batch(self._run_id, metrics=metrics)

    def _send_params(self, params: dict[str, str]) -> None:
        from mlflow.entities import Param

        entries = [Param(key, value[:_MAX_PARAM_CHARS]) for key, value in params.items()]
        for start in range(0, len(entries), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=entries[start : start + _MAX_PARAMS])

    def _send_status(self, status: str, at_ms: int) -> None:
        if status == "RUNNING":
            self._client.update_run(self._run_id, status)
        else:
            self._client.set_terminated(self._run_id, status, end_time=at_ms)

    def _send_inputs(self, inputs: list[InputData]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        datasets = []
        for data in inputs:
            profile = json.dumps({"num_rows": data.num_rows})
            dataset = Dataset(data.name, data.digest, "local", data.source, profile=profile)
            datasets.append(DatasetInput(dataset, [InputTag("mlflow.data.context", data.context)]))
        self._client.log_inputs(self._run_id, datasets=datasets)

    def _send_bytes(self, content: bytes, name: str) -> None:
        folder, _, file_name = name.rpartition("/")
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / file_name
            path.write_bytes(content)
            self._client.log_artifact(self._run_id, str(path), folder or None)
