"""What the errors of an MLflow store mean: for a record, for the run, for the user's terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vapo.tracking.delivery import RefusedError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_LEVELS = {
    "alembic": logging.WARNING,
    "mlflow.exceptions": logging.ERROR,
    "mlflow.store.tracking.sqlalchemy_store": logging.ERROR,
    "mlflow.store.db.utils": logging.CRITICAL,  # a traceback for every failed attempt
    "sqlalchemy.pool": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}
# codes of MLflow that say nothing about the record
_OUTAGE_CODES = frozenset(
    {
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
    }
)


def quiet_stores() -> None:
    """What MLflow and its libraries would print of a failure is said in one line of our own."""
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(level)


def is_outage(error: Exception) -> bool:
    """Whether the error is of the store's own state: full, read-only, locked, out of reach.

    Where MLflow's server passes on the database's error, only its text tells.
    """
    from requests import HTTPError
    from sqlalchemy.exc import InterfaceError, OperationalError, TimeoutError

    if is_records_fault(error):
        return False
    for link in _chain(error):
        if isinstance(link, (OperationalError, InterfaceError, TimeoutError)):
            return True
        if getattr(link, "error_code", None) in _OUTAGE_CODES:
            return True
        if isinstance(link, OSError):
            about_the_name = (HTTPError, IsADirectoryError, NotADirectoryError, FileNotFoundError)
            return not isinstance(link, about_the_name)
    return "OperationalError)" in str(error)


def is_records_fault(error: Exception) -> bool:
    """Whether the error is about what is in the record, so that it stays as it is."""
    if isinstance(error, (RefusedError, UnicodeError)):
        return True
    if getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE":
        return True
    too_large = getattr(getattr(error, "response", None), "status_code", None) == 413
    return too_large or "failed with error code 413 " in str(error)


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


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
