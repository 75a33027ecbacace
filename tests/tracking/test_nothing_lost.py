"""What a run's records meet besides a server that is away: none of them is lost in silence."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, INVALID_PARAMETER_VALUE
from sqlalchemy.pool import Pool

from vapo.cli import main
from vapo.config.schema import TrackingConfig
from vapo.tracking import delivery as delivery_module
from vapo.tracking.delivery import Delivery
from vapo.tracking.journal import Journal
from vapo.tracking.logger import RunLogger, make_run_logger
from vapo.tracking.records import Record
from vapo.tracking.stores import MlflowSink, locate_store

TABLES = ("metrics", "tags", "params", "latest_metrics")


@pytest.fixture
def own_store(tracking: TrackingConfig, tmp_path: Path) -> TrackingConfig:
    """A store of the test's own, which it may break."""
    folder = tmp_path / "mlruns"
    folder.mkdir()
    shutil.copy(Path(tracking.uri) / "mlflow.db", folder)
    return TrackingConfig(uri=str(folder), experiment="alone")


def client_of(config: TrackingConfig) -> MlflowClient:
    return MlflowClient(locate_store(config.uri).uri)


def steps_of(config: TrackingConfig, run_id: str | None, key: str = "a") -> list[int]:
    assert run_id is not None
    return [point.step for point in client_of(config).get_metric_history(run_id, key)]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "_MAX_ATTEMPTS", 3)
    monkeypatch.setattr(delivery_module, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(delivery_module, "_LONGEST_RETRY_S", 0.02)


# ---- a store that answers reads and refuses writes ----------------------------------------


@pytest.fixture(params=["full", "read-only", "trigger"])
def refuse_writes(request, own_store: TrackingConfig) -> Iterator[Callable[[bool], None]]:
    """Switches the store's writes off and on; reads go on."""
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


@pytest.mark.usefixtures("fast_retries")
def test_a_store_that_only_reads_is_an_outage(
    own_store: TrackingConfig, refuse_writes, tmp_path: Path, monkeypatch, capfd
):
    notes: list[str] = []
    run_dir = tmp_path / "run"
    logger = make_run_logger(
        own_store, run_name="x", journal=run_dir / "tracking", note=notes.append
    )
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
    for step in range(1, 40):
        logger.log_metrics({"a": float(step), **{f"b{n}": 1.0 for n in range(40)}}, step=step)
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
    assert steps_of(own_store, logger.run_id) == list(range(40))
    assert logger.run_id is not None
    run = client_of(own_store).get_run(logger.run_id)
    assert (run.info.status, run.data.tags["t"]) == ("FINISHED", "x" * 5000)


def test_what_the_store_finds_invalid_in_a_record_is_refused_at_once(own_store, tmp_path: Path):
    logger = make_run_logger(own_store, run_name="x", journal=tmp_path / "tracking")
    logger.log_metrics({"a": 1.0, "k" * 300: 1.0}, step=0)
    logger.log_metrics({"a": 2.0}, step=1)
    assert logger.close() == 0
    assert steps_of(own_store, logger.run_id) == [1]
    assert "exceeds" in (tmp_path / "tracking/refused.jsonl").read_text()


@pytest.mark.usefixtures("fast_retries")
@pytest.mark.parametrize("others_pass", [True, False])
def test_an_unclear_error_is_the_records_if_the_store_takes_the_next_one(others_pass: bool):
    taken: list[object] = []

    class Unclear:
        def send(self, records):
            if not others_pass or any(record.payload == "bad" for record in records):
                raise MlflowException("no reason", INTERNAL_ERROR)
            taken.extend(record.payload for record in records)

        may_pass_later = MlflowSink.may_pass_later

        def answers(self):
            return True

    delivery = Delivery(Unclear(), lambda text: None)  # type: ignore[arg-type]
    for payload in (1, "bad", 2):
        delivery.submit(Record("metrics", payload))
    report = delivery.close()
    left_and_refused = (report.undelivered, report.refused)
    assert left_and_refused == ((0, 1) if others_pass else (3, 0))
    assert set(taken) == ({1, 2} if others_pass else set())


def test_mlflows_own_word_for_an_invalid_record_does_not_pass_later():
    sink = MlflowSink.__new__(MlflowSink)
    assert not sink.may_pass_later(MlflowException("too long", INVALID_PARAMETER_VALUE))
    assert sink.may_pass_later(MlflowException("constraint failed", INTERNAL_ERROR))
    assert sink.may_pass_later(RuntimeError("who knows"))


# ---- a server that never comes to an end --------------------------------------------------


TRICKLED_RUN = """
import sys, time
from pathlib import Path
from vapo.config.schema import TrackingConfig
from vapo.tracking import delivery
from vapo.tracking.logger import make_run_logger
from vapo.tracking.stores import MlflowSink
import requests
delivery._CLOSE_S = 3.0
uri, journal, trickling = sys.argv[1:]
config = TrackingConfig(uri=uri, experiment="tests")
logger = make_run_logger(config, run_name="x", journal=Path(journal))
def trickle(self, records):
    requests.get(trickling, timeout=10).raise_for_status()
MlflowSink.send = trickle
logger.log_metrics({"a": 1.0}, step=0)
began = time.monotonic()
assert logger.close() == 2
print("closed after", time.monotonic() - began, flush=True)
"""


@pytest.fixture
def trickling_port() -> Iterator[int]:
    """A server that sends one byte of its answer after the other, for minutes."""
    done = threading.Event()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.2)

        def serve(connection):
            with connection:
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                    while not done.wait(0.3):
                        connection.sendall(b" ")
                except OSError:
                    pass

        def accept():
            while not done.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                connection.settimeout(5)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        done.set()
        thread.join(5)


def test_a_server_that_trickles_does_not_hold_a_finished_run(
    tracking: TrackingConfig, tmp_path: Path, trickling_port: int
):
    journal = tmp_path / "tracking"
    arguments = [tracking.uri, str(journal), f"http://127.0.0.1:{trickling_port}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", TRICKLED_RUN, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rpartition("closed after")[2]) < 6
    assert "2 of 2 records were not delivered" in done.stdout
    assert "did not come to an end within 3 s" in done.stdout
    assert f"vapo deliver {tmp_path}" in done.stdout
    assert main(["deliver", str(tmp_path)]) == 0
    records = list(Journal(journal).records(unsent=True))
    assert records == []


def test_what_an_abandoned_attempt_brings_later_touches_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(delivery_module, "_CLOSE_S", 0.2)
    go_on, ended = threading.Event(), threading.Event()

    class Slow:
        def send(self, records):
            go_on.wait(30)
            ended.set()

        def may_pass_later(self, error):
            return True

        def answers(self):
            return True

    journal = Journal(tmp_path)
    delivery = Delivery(Slow(), lambda text: None, journal)
    delivery.submit(Record("tags", {"a": "1"}))
    report = delivery.close()
    journal.close()
    assert (report.delivered, report.undelivered, report.lost) == (0, 1, 0)
    go_on.set()
    assert ended.wait(10)
    delivery._thread.join(10)
    assert not delivery._thread.is_alive()
    assert len(Journal(tmp_path)) == 1


# ---- a journal that is gone or cannot be read ---------------------------------------------


class Waiting:
    """A sink that can be away."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.away = True

    def send(self, records):
        if self.away:
            raise ConnectionError("away")
        self.taken += [record.payload for record in records]

    def may_pass_later(self, error):
        return False

    def answers(self):
        return not self.away


@pytest.mark.usefixtures("fast_retries")
def test_an_error_of_the_journal_does_not_end_the_delivery(tmp_path: Path, monkeypatch):
    notes: list[str] = []
    sink = Waiting()
    sink.away = False
    journal = Journal(tmp_path)
    tries = 0
    peek = journal.peek

    def broken(limit):
        nonlocal tries
        tries += 1
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(journal, "peek", broken)
    delivery = Delivery(sink, notes.append, journal)
    for number in range(3):
        delivery.submit(Record("tags", {"n": str(number)}))
    wait_for(lambda: tries > 3)
    assert sum("Input/output error" in note for note in notes) == 1
    monkeypatch.setattr(journal, "peek", peek)
    wait_for(lambda: len(sink.taken) == 3)
    report = delivery.close()
    assert sink.taken == [{"n": str(number)} for number in range(3)]
    assert (report.delivered, report.undelivered, report.refused) == (3, 0, 0)


@pytest.mark.usefixtures("fast_retries")
@pytest.mark.parametrize("what", ["tracking", "run", "."])
@pytest.mark.parametrize("away", [False, True])
def test_a_deleted_folder_is_said_and_its_records_are_still_sent(
    own_store: TrackingConfig, tmp_path: Path, monkeypatch, what: str, away: bool
):
    runs = tmp_path / "runs"
    journal = runs / "run/tracking"
    notes: list[str] = []
    logger = make_run_logger(own_store, run_name="x", journal=journal, note=notes.append)
    logger.log_metrics({"a": 0.0}, step=0)
    logger.finalize()
    send, is_away = MlflowSink.send, True

    def maybe(self, records):
        if is_away:
            raise ConnectionError("away")
        send(self, records)

    monkeypatch.setattr(MlflowSink, "send", maybe)
    logger.log_metrics({"a": 1.0}, step=1)
    shutil.rmtree(journal if what == "tracking" else (runs / what))
    logger.log_metrics({"a": 2.0}, step=2)
    logger.log_text("text", "notes/a.txt")
    is_away = away
    began = time.monotonic()
    left = logger.close()
    logger.discard_journal()
    assert time.monotonic() - began < 20
    assert not journal.exists()
    assert sum("it was deleted or moved" in note for note in notes[:2]) == 1
    if away:
        assert left == 4
        assert "4 of 5 records were not delivered" in notes[-1]
        assert "are lost" in notes[-1]
        assert not any("kept" in note or "vapo deliver" in note for note in notes)
    else:
        assert left == 0
        assert steps_of(own_store, logger.run_id) == [0, 1, 2]
        assert logger.run_id is not None
        assert client_of(own_store).get_run(logger.run_id).info.status == "FINISHED"


def test_the_end_does_not_wait_for_a_thread_that_has_died(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    class Broken(Journal):
        def peek(self, limit):
            raise RuntimeError("a bug")

    delivery = Delivery(Waiting(), lambda text: None, Broken(None))
    began = time.monotonic()
    delivery.submit(Record("tags", {}))
    assert delivery.flush(30) is False
    assert delivery.close().undelivered == 1
    assert time.monotonic() - began < 10


# ---- an MLflow run that is gone -----------------------------------------------------------


def interrupted(config: TrackingConfig, journal: Path | None) -> RunLogger:
    logger = make_run_logger(config, run_name="first", journal=journal, tags={"command": "fit"})
    logger.log_config("lr: 1\n", {"lr": 1})
    for step in range(3):
        logger.log_metrics({"a": float(step)}, step=step)
    logger.log_table([{"row": 1}], "samples/one.json")
    logger.close("FAILED")
    return logger


@pytest.mark.parametrize("how", ["another store", "deleted"])
def test_a_run_that_is_gone_is_continued_in_a_new_one(
    own_store: TrackingConfig, tracking: TrackingConfig, tmp_path: Path, how: str
):
    journal = tmp_path / "tracking"
    first = interrupted(own_store if how == "deleted" else tracking, journal)
    assert first.run_id is not None
    if how == "deleted":
        client_of(own_store).delete_run(first.run_id)
    notes: list[str] = []
    logger = make_run_logger(
        own_store, run_name="x", run_id=first.run_id, journal=journal, note=notes.append
    )
    assert len(notes) == 1, notes
    assert first.run_id in notes[0]
    assert logger.run_id not in (None, first.run_id)
    assert logger.run_id is not None
    assert logger.run_id in notes[0]
    assert dict(logger.recorded_steps) == {"a": 2}
    logger.skip_recorded()
    logger.log_config("lr: 2\n", {"lr": 2})
    for step in (2, 3):
        logger.log_metrics({"a": float(step)}, step=step)
    logger.log_table([{"row": 2}], "samples/two.json")
    logger.finalize()
    assert client_of(own_store).get_run(logger.run_id).info.status == "RUNNING"
    assert logger.close() == 0
    assert not (journal / "refused.jsonl").exists()
    assert steps_of(own_store, logger.run_id) == [0, 1, 2, 3]
    run = client_of(own_store).get_run(logger.run_id)
    assert run.data.tags["continues"] == first.run_id
    assert run.data.params == {"lr": "2"}
    assert '"samples/two.json"' in run.data.tags["mlflow.loggedArtifacts"]
    assert '"samples/one.json"' not in run.data.tags["mlflow.loggedArtifacts"]  # was sent: gone

    again = make_run_logger(own_store, run_name="x", run_id=logger.run_id, journal=journal)
    assert again.run_id == logger.run_id  # the journal belongs to the new run now
    again.log_metrics({"a": 4.0}, step=4)
    assert again.close() == 0
    assert steps_of(own_store, logger.run_id) == [0, 1, 2, 3, 4]


def test_a_run_and_a_journal_that_are_gone_are_begun_anew(
    own_store: TrackingConfig, tracking: TrackingConfig, tmp_path: Path
):
    first = interrupted(tracking, None)
    logger = make_run_logger(
        own_store, run_name="x", run_id=first.run_id, journal=tmp_path / "tracking"
    )
    logger.log_config("lr: 2\n", {"lr": 2})
    logger.log_metrics({"a": 3.0}, step=3)
    assert logger.close() == 0
    assert steps_of(own_store, logger.run_id) == [3]
    assert logger.run_id is not None
    assert client_of(own_store).get_run(logger.run_id).data.params == {"lr": "2"}


# ---- what a kill leaves in MLflow's artifacts ---------------------------------------------


def leave_upload(config: TrackingConfig, run_id: str | None, *, hours_ago: float = 0) -> Path:
    """As MLflow's copy to an artifact leaves it when the process is killed."""
    folder = locate_store(config.uri).artifact_folder(run_id, "samples")
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".artifact.uploading.x1y2z3"
    path.write_text("half")
    when = time.time() - hours_ago * 3600
    os.utime(path, (when, when))
    return path


def test_a_resumed_run_removes_the_uploads_that_a_kill_left(own_store, tmp_path: Path):
    first = interrupted(own_store, tmp_path / "tracking")
    left = leave_upload(own_store, first.run_id)
    logger = make_run_logger(
        own_store, run_name="x", run_id=first.run_id, journal=tmp_path / "tracking"
    )
    assert not left.exists()
    assert (left.parent / "one.json").is_file()
    logger.close()


def test_deliver_removes_the_uploads_that_a_kill_left(own_store, tmp_path: Path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(MlflowSink, "answers", lambda self: False)
        patched.setattr(MlflowSink, "send", lambda self, records: 1 / 0)
        first = interrupted(own_store, tmp_path / "tracking")
    left = leave_upload(own_store, first.run_id)
    assert main(["deliver", str(tmp_path)]) == 0
    assert not left.exists()
    left = leave_upload(own_store, first.run_id)
    assert main(["deliver", str(tmp_path)]) == 0  # also where there is nothing to send
    assert not left.exists()


def test_a_new_run_removes_only_old_uploads_of_other_runs(own_store, tmp_path: Path, monkeypatch):
    alive, dead = interrupted(own_store, None), interrupted(own_store, None)
    in_progress = leave_upload(own_store, alive.run_id)
    left = leave_upload(own_store, dead.run_id, hours_ago=30)
    logger = make_run_logger(own_store, run_name="x", journal=tmp_path / "tracking")
    wait_for(lambda: not left.exists(), 10)
    logger.close()
    assert in_progress.exists()
