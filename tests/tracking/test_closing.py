"""The end of a run: one deadline, whatever the store's server does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tracking.trouble import Waiting
from vapo.cli import main
from vapo.config.schema import TrackingConfig
from vapo.tracking import delivery as delivery_module
from vapo.tracking.delivery import Delivery
from vapo.tracking.journal import Journal
from vapo.tracking.records import Record

TRICKLED_RUN = """
import sys, time
from pathlib import Path
from vapo.config.schema import TrackingConfig
from vapo.tracking import delivery
from vapo.tracking.logger import RunLogger
from vapo.tracking.sink import MlflowSink
import requests
delivery._CLOSE_S = 3.0
uri, journal, trickling = sys.argv[1:]
config = TrackingConfig(uri=uri, experiment="tests")
logger = RunLogger(config, run_name="x", journal=Path(journal))
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


@pytest.mark.attacks
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
    assert "did not end within 3 s" in done.stdout
    assert f"vapo deliver {tmp_path}" in done.stdout
    assert main(["deliver", str(tmp_path)]) == 0
    assert len(Journal(journal)) == 0


def test_waiting_for_a_store_that_hangs_counts_towards_the_deadline(monkeypatch):
    monkeypatch.setattr(delivery_module, "_CLOSE_S", 0.8)
    done = threading.Event()

    class Hanging(Waiting):
        def send(self, records):
            done.wait(30)

    delivery = Delivery(Hanging(), lambda text: None)
    delivery.submit(Record("tags", {}))
    began = time.monotonic()
    assert delivery.flush(0.3) is False
    report = delivery.close()
    assert time.monotonic() - began < 1.1, "0.8 s, and not 0.3 s more"
    assert (report.undelivered, report.num_lost) == (1, 1)
    assert report.last_error == "an attempt did not end within 0.5 s"
    done.set()


def test_what_an_abandoned_attempt_brings_later_touches_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(delivery_module, "_CLOSE_S", 0.2)
    go_on, ended = threading.Event(), threading.Event()

    class Slow:
        def send(self, records):
            go_on.wait(30)
            ended.set()

    journal = Journal(tmp_path)
    delivery = Delivery(Slow(), lambda text: None, journal)
    delivery.submit(Record("tags", {"a": "1"}))
    report = delivery.close()
    journal.close()
    assert (report.delivered, report.undelivered, report.num_lost) == (0, 1, 0)
    go_on.set()
    assert ended.wait(10)
    delivery._thread.join(10)
    assert not delivery._thread.is_alive()
    assert len(Journal(tmp_path)) == 1


def test_the_end_does_not_wait_for_a_thread_that_has_died(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    class Broken(Journal):
        def waiting(self):
            raise RuntimeError("a bug")

    delivery = Delivery(Waiting(), lambda text: None, Broken(None))
    began = time.monotonic()
    delivery.submit(Record("tags", {}))
    assert delivery.flush(30) is False
    assert delivery.close().undelivered == 1
    assert time.monotonic() - began < 10
