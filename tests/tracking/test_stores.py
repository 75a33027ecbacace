import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from tests.builders import free_port
from vapo.config.schema import TrackingConfig
from vapo.errors import UserError
from vapo.tracking.logger import RunLogger
from vapo.tracking.opening import open_store
from vapo.tracking.stores import Store, locate_store


@pytest.fixture
def silent_port():
    """A server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        accepted = []

        def accept():
            try:
                while True:
                    accepted.append(server.accept()[0])
            except OSError:
                pass

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for connection in accepted:
        connection.close()


def assert_unusable_within(uri, seconds):
    began = time.perf_counter()
    with pytest.raises(UserError) as caught:
        RunLogger(TrackingConfig(uri=uri), run_name="x")
    assert time.perf_counter() - began < seconds
    return str(caught.value)


def test_an_unreachable_server_is_an_error_in_seconds():
    port = free_port()
    message = assert_unusable_within(f"http://me:secret@127.0.0.1:{port}", 10)
    assert "tracking.uri" in message
    assert f"http://127.0.0.1:{port}" in message
    assert "secret" not in message
    assert "tracking.uri=mlruns" in message


@pytest.mark.attacks
def test_a_server_that_never_answers_is_an_error_in_seconds(silent_port):
    assert "tracking.uri" in assert_unusable_within(f"http://127.0.0.1:{silent_port}", 15)


def test_an_unwritable_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    message = assert_unusable_within(str(tmp_path / "file" / "mlruns"), 5)
    assert "tracking.uri: cannot write in" in message


def test_a_file_that_is_no_database_is_an_error(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is not a database, " * 100)
    assert "no usable MLflow store" in assert_unusable_within(str(tmp_path), 30)


def test_a_folder_means_a_database_and_artifacts_inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = Store(f"sqlite:///{tmp_path}/mlruns/mlflow.db", tmp_path / "mlruns" / "mlflow.db")
    assert locate_store("mlruns") == expected
    assert locate_store(str(tmp_path / "mlruns")) == expected
    assert locate_store(f"file://{tmp_path}/mlruns") == expected
    assert expected.artifact_location == f"file://{tmp_path}/mlruns/artifacts"


@pytest.mark.parametrize(
    ("uri", "database"),
    [
        ("sqlite:////data/runs.db", Path("/data/runs.db")),
        ("http://127.0.0.1:5000", None),
        ("https://tracking.example.org", None),
        ("databricks", None),
        ("databricks://profile", None),
        ("postgresql://user:word@127.0.0.1/db", None),
    ],
)
def test_uris_are_taken_as_they_are(uri, database):
    assert locate_store(uri) == Store(uri, database)


def test_passwords_are_not_shown():
    store = locate_store("postgresql://user:word@127.0.0.1:5432/db?a=b")
    assert store.shown_uri == "postgresql://127.0.0.1:5432/db?a=b"


def test_empty_uri():
    with pytest.raises(UserError, match=r"tracking\.uri is empty"):
        locate_store(" ")


OPENING = """
import sys
from vapo.tracking.opening import open_store
from vapo.tracking.stores import locate_store
open_store(locate_store(sys.argv[1]), "e", print)
"""


@pytest.mark.kills
def test_a_store_whose_making_was_killed_is_made_anew(tmp_path):
    """MLflow's migrations take seconds, each in a transaction of its own."""
    process = subprocess.Popen([sys.executable, "-c", OPENING, str(tmp_path)])
    until = time.monotonic() + 100
    while not any(file.stat().st_size for file in tmp_path.glob("*.db*")):
        files = [f for f in tmp_path.glob(".*.db*") if f.suffix != ".lock" and f.stat().st_size]
        if files or time.monotonic() > until:
            break
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    assert open_store(locate_store(str(tmp_path)), "e", print)
    assert [file.name for file in sorted(tmp_path.iterdir())] == [".mlflow.db.lock", "mlflow.db"]


@pytest.mark.slow
def test_only_the_making_of_the_tables_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """What a run records later is on the disk: 2 stands for "full", 0 for "off"."""
    found: dict[str, set[int]] = {}

    def look(connection: sqlite3.Connection, *others: object) -> None:
        (_, _, path), *_ = connection.execute("PRAGMA database_list")
        (waits,) = connection.execute("PRAGMA synchronous").fetchone()
        found.setdefault(Path(path).name, set()).add(waits)

    event.listen(Engine, "checkout", look)
    try:
        open_store(locate_store(str(tmp_path / "mlruns")), "some runs", lambda note: None)
    finally:
        event.remove(Engine, "checkout", look)
    assert found == {".mlflow.db.new": {0}, "mlflow.db": {2}}
