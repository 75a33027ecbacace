"""SQLite that does not wait for the disk: its commits took a fifth of the suite's time.

A process that is killed loses nothing by it; only a machine without power would.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress


def hurry(connection: object, record: object) -> None:
    """For SQLAlchemy's event `connect`."""
    if isinstance(connection, sqlite3.Connection):
        with suppress(sqlite3.DatabaseError):  # a file that is no database: the test's business
            connection.execute("PRAGMA synchronous=OFF")
