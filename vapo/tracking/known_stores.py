"""Remembers the stores that this user has named, in a file of the home folder, as ssh keeps hosts.

A run's folder may come from somebody else, and it names a store. Using a store means sending it the
environment's credentials, and writing artifacts where it says. So a store that a run's folder names
is used only if the user has named it, too: in MLFLOW_TRACKING_URI, in an option or a config of this
command, or in one of an earlier command, which the file remembers.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vapo.config.credentials import split_uri
from vapo.errors import UserError
from vapo.errors.secret_rule import TRACKING_URI
from vapo.tracking.stores import Store, locate_store

_MAX_BYTES = 2**22


def remember_store(store: Store) -> None:
    """Add a store that the user has named to the file. If that fails, it must be named again."""
    if is_known(store):
        return
    with suppress(OSError, RuntimeError):  # no home folder, or one that may not be written
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{_name(store)}\n")


def is_known(store: Store) -> bool:
    """Whether the user has named this store, in the environment or for an earlier command."""
    name = _name(store)
    with suppress(UserError):
        variable = os.environ.get(TRACKING_URI, "")
        if variable and _name(locate_store(split_uri(variable).bare)) == name:
            return True
    try:
        with _path().open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_BYTES))
            return name.encode() in file.read(_MAX_BYTES).splitlines()
    except (OSError, RuntimeError):
        return False


def keeps_beside(store: Store, run_id: str) -> bool:
    """Whether a store is a local SQLite database with this run and its artifacts beside it.

    Then nothing leaves this machine, and neither an address in the database nor a link makes
    anything be written elsewhere. The database is only read.
    """
    if store.database is None or store.uri != f"sqlite:///{store.database}":
        return False  # with options in its address another file might be opened
    place = f"{store.database.as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(place, uri=True)) as database:
            query = "SELECT artifact_uri FROM runs WHERE run_uuid = ?"
            row = database.execute(query, (run_id,)).fetchone()
    except sqlite3.Error:
        return False
    return row is not None and _is_beside(str(row[0]), store)


def _is_beside(uri: str, store: Store) -> bool:
    """Whether a folder of artifacts lies in the store's own folder, and no link leads out of it."""
    if not uri.startswith(f"{store.artifact_location}/") or ".." in unquote(uri):
        return False
    folder = Path(unquote(urlsplit(uri).path))
    around = store.database.parent if store.database else folder
    parents = [path for path in folder.parents if around in path.parents]
    return not any(path.is_symlink() for path in (*parents, folder, *folder.rglob("*")))


def check_known(uri: str, *, named_by: Path, how: str, run_id: str | None = None) -> None:
    """Check that a store which a run's folder or file (`named_by`) names may be used.

    Args:
        how: what the user would write in front of the store's address to name it, such as an
            option.
        run_id: the run to which records are sent, or None.

    Raises: UserError: the user has not named the store.
    """
    store = locate_store(uri)
    if is_known(store) or (run_id is not None and keeps_beside(store, run_id)):
        return
    address = store.shown_uri
    raise UserError(
        f"{named_by} names the store {address}, which no command of yours has used so far; records "
        "and credentials are sent only to a store that you name yourself. If this is the right "
        f"one, add {how}{address}, or set {TRACKING_URI}; else add the one that you want"
    )


def _name(store: Store) -> str:
    return " ".join(store.shown_uri.rstrip("/").split())


def _path() -> Path:
    """Return the path of known stores' file. Raises: RuntimeError: there is no home folder."""
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(folder) / "vapo" / "stores"
