"""The MLflow store that `tracking.uri` names, and its credentials.

A server's user name and password are MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. A
database's are in MLFLOW_TRACKING_URI, the whole URI, which is used where it names the same store as
`tracking.uri` does. So a config needs neither, and processes that this one starts have them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from vapo.config.credentials import SplitUri, split_uri
from vapo.errors import UserError
from vapo.errors.redactor import Redactor, redacted
from vapo.errors.secret_rule import (
    TRACKING_PASSWORD,
    TRACKING_URI,
    TRACKING_USER,
    secrets_within,
)
from vapo.files.whole_files import why_not_writable

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from vapo.tracking.delivery import DeliveryReport

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

DATABASE_NAME = "mlflow.db"
_HTTP = ("http://", "https://")

# the earlier value of each environment variable that is set for the present store
_previous_variables: dict[str, str | None] = {}


@dataclass(frozen=True)
class Store:
    """The address of an MLflow store. `database` is its SQLite file, or None for any other kind.

    `uri` has the credentials and must not be shown: MLflow is given `client_uri`, people and files
    get `shown_uri`.
    """

    uri: str = field(repr=False)
    database: Path | None = None

    @property
    def parts(self) -> SplitUri:
        return split_uri(self.uri)

    @property
    def shown_uri(self) -> str:
        """The URI without credentials."""
        return self.parts.bare

    @property
    def client_uri(self) -> str:
        """The address for MLflow. It has no credentials of a server, which MLflow reads from
        variables."""
        return self.shown_uri if self.is_http else self.uri

    @property
    def is_http(self) -> bool:
        return self.uri.startswith(_HTTP)

    @property
    def artifact_location(self) -> str | None:
        """The address of the artifacts' folder beside the database; None lets the server choose."""
        return (self.database.parent / "artifacts").as_uri() if self.database else None

    def artifact_folder(self, run_id: str | None, name: str) -> Path | None:
        """Return the folder of a run's artifacts `name`; None unless beside a local database."""
        if self.database is None or run_id is None:
            return None
        return self.database.parent / "artifacts" / run_id / "artifacts" / name

    def hand_over_credentials(self) -> None:
        """Set the variables from which MLflow and child processes read this store's credentials.

        Variables that were set for another store are first restored, so that no store is sent
        another one's password. Call it before MLflow uses the store.
        """
        for name, value in _previous_variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _previous_variables.clear()
        parts = self.parts
        if not parts.has_credentials:
            return
        of_server = {TRACKING_USER: parts.user, TRACKING_PASSWORD: parts.password}
        for name, value in (of_server if self.is_http else {TRACKING_URI: self.uri}).items():
            if value is not None:
                _previous_variables[name] = os.environ.get(name)
                os.environ[name] = value

    def client(self) -> MlflowClient:
        """Return an MLflow client with the store's credentials. No request is made yet."""
        self.hand_over_credentials()
        from mlflow import MlflowClient

        from vapo.tracking.answers import limit_answers

        limit_answers()
        return MlflowClient(self.client_uri)

    def redact(self, text: str) -> str:
        """Return a text, such as an error's, without the URI's credentials and known secrets."""
        text = text.replace(self.uri, self.shown_uri)
        user_part, at, _ = self.uri.partition("://")[2].rpartition("@")
        text = text.replace(user_part + at, "") if at else text
        return redacted(Redactor((secret, "***") for secret in secrets_within(self.uri))(text))


def locate_store(uri: str) -> Store:
    """Return the store that a URI names. A folder (or `file:` URI) means `mlflow.db` inside it.

    A URI without credentials gets those of MLFLOW_TRACKING_URI, if both name the same store.

    Raises: UserError: the URI is empty, or is a server's that cannot be parsed.
    """
    other_uri = os.environ.get(TRACKING_URI, "")
    if not split_uri(uri).has_credentials and split_uri(other_uri).bare == uri:
        uri = other_uri
    if not uri.strip():
        raise UserError("tracking.uri is empty: give a folder, as mlruns, or an MLflow URI")
    if uri.startswith("file:"):
        return locate_store(unquote(urlsplit(uri).path))
    if match := re.match(r"sqlite:///(.+)", uri):
        return Store(uri, Path(match[1].partition("?")[0]).absolute())
    if uri.startswith(_HTTP):
        _check_server(uri)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", uri) or uri in ("databricks", "databricks-uc"):
        return Store(uri)
    database = Path(uri).expanduser().absolute() / DATABASE_NAME
    return Store(f"sqlite:///{database}", database)


def check_writable(store: Store) -> None:
    """Check that the folder of a local store can be written. Nothing is made.

    Raises: UserError: it cannot be written.
    """
    if store.database and (reason := why_not_writable(store.database.parent)):
        raise cannot_write_store(store.database.parent, reason)


def cannot_write_store(folder: Path, reason: str | None) -> UserError:
    """Return the error for a local store whose folder cannot be written."""
    return UserError(
        f"tracking.uri: cannot write in {folder}: {reason}; choose another folder, as "
        "tracking.uri=mlruns"
    )


def _check_server(uri: str) -> None:
    """Check that a server's URI can be parsed into name, port and credentials.

    Raises: UserError: it cannot. The message does not quote the URI.
    """
    rest = split_uri(uri).bare.partition("://")[2]
    if "?" in uri.partition("#")[0] or "#" in uri:
        problem = "a server's address has no '?' and no '#'"
    elif not rest.strip("/") or "@" in rest.partition("/")[0]:
        problem = "the server's name is missing or not readable"
    else:
        return
    raise UserError(
        f"tracking.uri: {problem}: give http://HOST:PORT, and its credentials as {TRACKING_USER} "
        f"and {TRACKING_PASSWORD}, or a token as MLFLOW_TRACKING_TOKEN, in the environment (a URI "
        "with credentials would need '/', '?', '#' and '@' in them as %2F, %3F, %23 and %40)"
    )


def what_was_not_sent(report: DeliveryReport, folder: Path | None, store: Store) -> list[str]:
    """Return lines for the user, at the end of a run, about records that the store does not have.

    If it has everything, there are none. The store's credentials must then come from the
    environment, because nothing keeps them.
    """
    lines = []
    if report.undelivered:
        total = report.delivered + report.undelivered + report.refused
        line = (
            f"tracking: {report.undelivered} of {total} records were not delivered to "
            f"{store.shown_uri} (last error: {report.last_error})"
        )
        if report.num_lost:
            line += f"; {report.num_lost} are lost"
            line += f": {folder} cannot be written, or was deleted or moved" if folder else ""
        lines.append(line)
    if report.undelivered > report.num_lost and folder is not None:
        lines[0] += "; send what is kept with"
        command = f"  vapo deliver {folder.parent}"
        if store.parts.has_credentials:
            names = f"{TRACKING_USER} and {TRACKING_PASSWORD}" if store.is_http else TRACKING_URI
            command += f"  # with the store's credentials in {names}"
        lines.append(command)
    if report.missing_files:
        names = ", ".join(report.missing_files)
        lines.append(f"tracking: {store.shown_uri} does not have artifacts that it took: {names}")
    if report.refused:
        refused_file = folder and folder / "refused.jsonl"
        where = f"; see {refused_file}" if refused_file and refused_file.is_file() else ""
        lines.append(f"tracking: {store.shown_uri} refused {report.refused} records{where}")
    return lines
