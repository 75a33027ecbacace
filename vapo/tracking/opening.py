"""Opens an MLflow store. If it does not answer, that is an error within seconds."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vapo.errors import UserError
from vapo.errors.secret_rule import TRACKING_PASSWORD, TRACKING_URI, TRACKING_USER
from vapo.files.whole_files import write_whole
from vapo.tracking.delivery import one_line
from vapo.tracking.known_stores import remember_store
from vapo.tracking.shared_view import VIEW_TAG, share_view, view_state
from vapo.tracking.sink import is_active, known_run
from vapo.tracking.stores import Store, cannot_write_store

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ANOTHER_RUN = "resume the training with --ckpt_path, which sends its records to a new run"

# MLflow's own retries would hold a request for minutes; `delivery` tries again instead. And the
# links to a run that it prints at the run's end open the view for agents (see `links`).
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
# What MLflow and its libraries would print of a failure is said in one line of our own.
_LOG_LEVELS = {
    "alembic": logging.WARNING,
    "mlflow.exceptions": logging.ERROR,
    "mlflow.store.tracking.sqlalchemy_store": logging.ERROR,
    "mlflow.store.db.utils": logging.CRITICAL,  # a traceback for every failed attempt
    "sqlalchemy.pool": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}


def open_store(store: Store, experiment: str, note: Callable[[str], None]) -> str:
    """Return the id of an experiment in a store. Store and experiment are made if they are missing.

    Raises: UserError: the store cannot be written or does not answer. This takes seconds at most.
    """
    with _only_one_opener(store):
        if "mlflow" not in sys.modules:
            note("loading mlflow, to record the run ...")
        if store.database and not store.database.exists():
            note(f"creating the tracking store {store.database} (some seconds, once)")
        with _answering(store) as client:
            from mlflow.exceptions import MlflowException

            remember_store(store)

            stored_experiment = client.get_experiment_by_name(experiment)
            if stored_experiment is None:
                tags = {VIEW_TAG: view_state()}
                try:
                    return str(client.create_experiment(experiment, store.artifact_location, tags))
                except MlflowException:  # another run may have made it meanwhile
                    if (stored_experiment := client.get_experiment_by_name(experiment)) is None:
                        raise
            if stored_experiment.lifecycle_stage == "deleted":
                raise UserError(
                    f"tracking.experiment: the experiment '{experiment}' was deleted in this "
                    "store; restore it or choose another name"
                )
            share_view(client, stored_experiment)
            return str(stored_experiment.experiment_id)


def client_of(store: Store, run_id: str, *, cure: str = _ANOTHER_RUN) -> MlflowClient:
    """Return a client of a store, after checking that the store answers and has this run.

    Args:
        cure: advice for the error when the store has no such run, or has deleted it.

    Raises: UserError: the store does not answer, or does not have the run. This takes seconds at
        most.
    """
    if store.database and not store.database.is_file():
        raise UserError(f"tracking_uri: the file {store.database} does not exist")
    with _answering(store) as client:
        run = known_run(client, run_id)
    if run is None:
        raise UserError(f"{store.shown_uri} has no run {run_id}: {cure}")
    if not is_active(run):
        raise UserError(f"{store.shown_uri}: the run {run_id} was deleted: restore it, or {cure}")
    return client


def check_store_answers(store: Store) -> None:
    """Check that a store answers. Nothing is written into it.

    Raises: UserError: the store does not answer. This takes seconds at most.
    """
    with _answering(store) as client:
        client.search_experiments(max_results=1)


@contextmanager
def _answering(store: Store) -> Iterator[MlflowClient]:
    """Yield a client whose requests fail within seconds. Make the database if it is missing.

    Raises: UserError: in place of every error that a request in the block raises.
    """
    for name, level in _LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        if (database := store.database) and not database.exists():
            from mlflow.db import upgrade

            for suffix in ("", "-journal", "-wal", "-shm"):  # of a process that was killed
                database.with_name(f".{database.name}.new{suffix}").unlink(missing_ok=True)
            # aside: MLflow never opens a store again whose making was cut short
            with _changes_are_not_waited_for():
                write_whole(database, lambda aside: upgrade.callback(f"sqlite:///{aside}"))
        yield store.client()
    except (MlflowException, SQLAlchemyError, OSError) as error:
        reason = one_line(store.redact(str(error)))
        if store.is_http:
            names = f"{TRACKING_USER}, {TRACKING_PASSWORD}"
            fix = f"start the server, fix the address or its credentials ({names})"
        elif store.database:
            fix = "is it an MLflow database, written by this version of mlflow or an older one?"
        else:
            fix = f"fix the address; {TRACKING_URI} may hold it with its credentials"
        raise UserError(
            f"tracking.uri: no usable MLflow store at {store.shown_uri}: {reason}\n"
            f"  {fix}; or record locally with tracking.uri=mlruns"
        ) from error


@contextmanager
def _changes_are_not_waited_for() -> Iterator[None]:
    """Keep SQLite from waiting for the disk after each of the many changes in the block."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def hurry(connection: Any, record: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", hurry)
    try:
        yield
    finally:
        event.remove(Engine, "connect", hurry)


def _only_one_opener(store: Store) -> AbstractContextManager[object]:
    """Return a context that one process at a time holds, to make a local database's tables."""
    if store.database is None:
        return nullcontext()
    folder = store.database.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            lock = (folder / f".{store.database.name}.lock").open("w")
    except OSError as error:
        raise cannot_write_store(folder, error.strerror) from error
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock
