"""A store that answers reads and refuses writes; records that are at fault themselves."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import requests
import sqlalchemy
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException, RestException
from mlflow.protos.databricks_pb2 import (
    INTERNAL_ERROR,
    INVALID_PARAMETER_VALUE,
    PERMISSION_DENIED,
    TEMPORARILY_UNAVAILABLE,
)
from sqlalchemy.pool import Pool

from tests.tracking.trouble import client_of, steps_of, wait_for
from vapo.cli import main
from vapo.config.schema import TrackingConfig
from vapo.tracking.delivery import Delivery
from vapo.tracking.journal import Journal
from vapo.tracking.logger import RunLogger
from vapo.tracking.records import Record
from vapo.tracking.sink import MlflowSink, fault_of
from vapo.tracking.stores import locate_store

TABLES = ("metrics", "tags", "params", "latest_metrics")


@pytest.fixture(
    params=[
        pytest.param("full", marks=pytest.mark.slow),
        "read-only",
        pytest.param("trigger", marks=pytest.mark.slow),
    ]
)
def refuse_writes(request, own_store: TrackingConfig) -> Iterator[Callable[[bool], None]]:
    """Switches the store's writes off and on; reads still work."""
    database = Path(own_store.uri) / "mlflow.db"
    off = False

    def limit(connection, *_):
        cursor = connection.cursor()
        if request.param == "full":  # a page count below the present one means the present one
            cursor.execute(f"PRAGMA max_page_count = {1 if off else 2**30}")
        elif request.param == "read-only":
            cursor.execute(f"PRAGMA query_only = {int(off)}")

    def switch(refuse: bool) -> None:
        nonlocal off
        off = refuse
        if request.param != "trigger":
            return
        with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
            for table in TABLES:
                for event in ("INSERT", "UPDATE"):
                    name = f"no_{table}_{event}"
                    connection.execute(f"DROP TRIGGER IF EXISTS {name}")
                    if refuse:
                        connection.execute(
                            f"CREATE TRIGGER {name} BEFORE {event} ON {table} "
                            "BEGIN SELECT RAISE(ABORT, 'no writes'); END"
                        )

    sqlalchemy.event.listen(Pool, "checkout", limit)
    yield switch
    sqlalchemy.event.remove(Pool, "checkout", limit)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_retries")
def test_a_store_that_only_reads_is_an_outage(
    own_store: TrackingConfig, refuse_writes, tmp_path: Path, monkeypatch, capfd
):
    notes: list[str] = []
    run_dir = tmp_path / "run"
    logger = RunLogger(own_store, run_name="x", journal=run_dir / "tracking", note=notes.append)
    logger.log_metrics({"a": 0.0}, step=0)
    logger.finalize()
    tries = 0
    send = MlflowSink.send

    def counted(self, records):
        nonlocal tries
        tries += 1
        send(self, records)

    monkeypatch.setattr(MlflowSink, "send", counted)
    refuse_writes(True)
    capfd.readouterr()
    for step in range(1, 20):
        logger.log_metrics({"a": float(step), **{f"b{n}": 1.0 for n in range(20)}}, step=step)
    logger.set_tags({"t": "x" * 5000})
    wait_for(lambda: tries > 12)
    left = logger.close()
    assert left > 0
    assert not (run_dir / "tracking/refused.jsonl").exists()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")  # MLflow prints no tracebacks
    assert len(notes) == 3, notes  # the outage; at the end what is left, and the command
    assert "the store does not take records" in notes[0]
    assert len(notes[0]) < 300
    assert notes[2].strip() == f"vapo deliver {run_dir}"
    assert main(["deliver", str(run_dir), "--list"]) == 0
    assert f"{left} records" in capfd.readouterr().out
    refuse_writes(False)
    assert main(["deliver", str(run_dir)]) == 0
    assert steps_of(own_store, logger.run_id) == list(range(20))
    assert logger.run_id is not None
    run = client_of(own_store).get_run(logger.run_id)
    assert (run.info.status, run.data.tags["t"]) == ("FINISHED", "x" * 5000)


def test_what_the_store_finds_invalid_in_a_record_is_refused_at_once(own_store, tmp_path: Path):
    logger = RunLogger(own_store, run_name="x", journal=tmp_path / "tracking")
    logger.log_metrics({"a": 1.0, "k" * 300: 1.0}, step=0)
    logger.log_metrics({"a": 2.0}, step=1)
    assert logger.close() == 0
    assert steps_of(own_store, logger.run_id) == [1]
    assert "exceeds" in (tmp_path / "tracking/refused.jsonl").read_text()


def test_records_of_a_run_that_is_deleted_wait_until_it_is_restored(own_store, tmp_path: Path):
    """MLflow calls them invalid then."""
    logger = RunLogger(own_store, run_name="x", journal=tmp_path / "tracking")
    assert logger.run_id is not None
    logger.finalize()
    client_of(own_store).delete_run(logger.run_id)
    for step in range(3):
        logger.log_metrics({"a": float(step)}, step=step)
    assert logger.close() == 4
    assert not (tmp_path / "tracking/refused.jsonl").exists()
    client_of(own_store).restore_run(logger.run_id)
    assert main(["deliver", str(tmp_path)]) == 0
    assert steps_of(own_store, logger.run_id) == [0, 1, 2]


class Client:
    """Of a store that has the run, and raises `error` for metrics whose key `is_bad` says so."""

    def __init__(self, error: Exception, is_bad: Callable[[str], bool]) -> None:
        self.error, self.is_bad = error, is_bad
        self.taken: set[str] = set()

    def get_run(self, run_id: str) -> object:
        return SimpleNamespace(info=SimpleNamespace(lifecycle_stage="active"))

    def log_batch(self, run_id: str, metrics: list[Metric]) -> None:
        keys = {metric.key for metric in metrics}
        if any(map(self.is_bad, keys)):
            raise self.error
        self.taken |= keys


@pytest.mark.usefixtures("fast_retries")
@pytest.mark.parametrize("others_pass", [True, False])
def test_an_unclear_error_is_the_records_if_the_store_takes_the_next_one(others_pass: bool):
    error = MlflowException("no reason", INTERNAL_ERROR)
    client = Client(error, lambda key: key == "bad" or not others_pass)
    delivery = Delivery(MlflowSink(cast(MlflowClient, client), "run"), lambda text: None)
    for key in ("1", "bad", "2"):
        delivery.submit(Record("metrics", [(key, 1.0, 1, 0)]))
    report = delivery.close()
    left_and_refused = (report.undelivered, report.refused)
    assert left_and_refused == ((0, 1) if others_pass else (3, 0))
    assert client.taken == ({"1", "2"} if others_pass else set())


def test_reasons_are_written_without_the_stores_credentials(tmp_path: Path) -> None:
    """A database driver repeats its URI in an error."""
    uri = "postgresql://keeper:pa55word@127.0.0.1/runs"
    client = Client(MlflowException(f"{uri}: too long", INVALID_PARAMETER_VALUE), lambda key: True)
    sink = MlflowSink(cast(MlflowClient, client), "run")
    journal, notes = Journal(tmp_path / "tracking"), list[str]()
    delivery = Delivery(sink, notes.append, journal, redact=locate_store(uri).redact)
    delivery.submit(Record("metrics", [("a", 1.0, 1, 0)]))
    report = delivery.close()
    journal.close()
    refused = (tmp_path / "tracking/refused.jsonl").read_text()
    assert report.refused == 1
    for text in (refused, report.last_error or "", *notes):
        assert "too long" in text
        assert "pa55word" not in text
        assert "keeper" not in text


def http_error(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(f"{status} of the server", response=response)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (MlflowException("too long", INVALID_PARAMETER_VALUE), "record"),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), "record"),
        (http_error(413), "record"),
        (MlflowException("it failed with error code 413 != 200", INTERNAL_ERROR), "record"),
        (MlflowException("constraint failed", INTERNAL_ERROR), None),
        (RuntimeError("who knows"), None),
        (http_error(400), None),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), None),
        (OSError(errno.ENOSPC, "No space left on device"), "store"),
        (PermissionError(errno.EACCES, "Permission denied"), "store"),
        (requests.ConnectionError("no route"), "store"),
        (MlflowException("busy", TEMPORARILY_UNAVAILABLE), "store"),
        (MlflowException("who are you", PERMISSION_DENIED), "store"),
        (RestException({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "x"}), "store"),
        (
            RestException(
                {
                    "error_code": "INTERNAL_ERROR",
                    "message": "(sqlite3.OperationalError) database or disk is full",
                }
            ),
            "store",
        ),
    ],
)
def test_which_errors_are_of_the_record_and_which_of_the_store(error: Exception, fault: str | None):
    assert fault_of(error) == fault
