"""Tracking stores whose tables are there already: MLflow's migrations take seconds, a copy none."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path

from mlflow.db import upgrade


@cache
def _tables() -> bytes:
    """An MLflow database without an experiment."""
    with tempfile.TemporaryDirectory() as folder:
        upgrade.callback(f"sqlite:///{folder}/mlflow.db")
        with closing(sqlite3.connect(f"{folder}/mlflow.db")) as database:
            return database.serialize()


def ready_store(folder: Path) -> Path:
    """The folder, as `tracking.uri` takes it; made with its tables unless it has some."""
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / "mlflow.db"
    if not database.exists():
        database.write_bytes(_tables())
    return folder
