"""Delivery with a sink that fails on purpose."""

import threading
import time
from typing import get_args

import pytest

from tests.tracking.trouble import wait_for
from vapo.config.schema import TrackingConfig
from vapo.tracking import delivery as delivery_module
from vapo.tracking.delivery import Delivery, OutageError, Record, RefusedError
from vapo.tracking.logger import RunLogger
from vapo.tracking.records import Kind
from vapo.tracking.sink import MlflowSink


class Sink:
    """Takes records while `error` is None; raises it otherwise."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.poison: set[object] = set()
        self.taken: list[object] = []
        self.batches: list[int] = []
        self.tried = threading.Event()

    def send(self, records):
        try:
            if self.error is not None:
                raise self.error
            payloads = [record.payload for record in records]
            if self.poison & set(payloads):
                raise RefusedError("refused")
            self.taken += payloads
            self.batches.append(len(payloads))
        finally:
            self.tried.set()


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch):
    monkeypatch.setattr(delivery_module, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(delivery_module, "_LONGEST_RETRY_S", 0.02)


def submit_all(delivery, payloads, kind="metrics"):
    for payload in payloads:
        delivery.submit(Record(kind, payload))


def test_order_is_kept_across_kinds_and_metrics_are_batched():
    sink = Sink()
    notes: list[str] = []
    delivery = Delivery(sink, notes.append)
    for start in range(0, 600, 60):
        submit_all(delivery, range(start, start + 59))
        submit_all(delivery, [start + 59], kind="file")
    report = delivery.close()
    assert sink.taken == list(range(600))
    assert (report.delivered, report.undelivered, notes) == (600, 0, [])
    assert len(sink.batches) < 600


@pytest.mark.parametrize("kind", get_args(Kind))
def test_an_outage_delays_and_loses_nothing(kind):
    sink = Sink()
    notes: list[str] = []
    sink.error = OutageError("no route")
    delivery = Delivery(sink, notes.append)
    submit_all(delivery, range(5), kind=kind)
    assert sink.tried.wait(5)
    assert delivery.flush(5) is False
    sink.error = None
    report = delivery.close()
    assert sink.taken == list(range(5))
    assert (report.delivered, report.undelivered) == (5, 0)
    assert len(notes) == 2
    assert "no route" in notes[0]
    assert "takes records again" in notes[1]


def test_an_outage_of_many_attempts_drops_nothing(monkeypatch):
    monkeypatch.setattr(delivery_module, "_MAX_ATTEMPTS", 3)
    monkeypatch.setattr(delivery_module, "_FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(delivery_module, "_LONGEST_RETRY_S", 0.001)

    class Counting(Sink):
        num_tries = 0

        def send(self, records):
            self.num_tries += 1
            super().send(records)

    sink = Counting()
    sink.error = OutageError("away")
    delivery = Delivery(sink, lambda text: None)
    submit_all(delivery, range(5))
    deadline = time.perf_counter() + 20
    while sink.num_tries < 12 and time.perf_counter() < deadline:
        time.sleep(0.005)
    sink.error = None
    report = delivery.close()
    assert sink.num_tries >= 12
    assert sink.taken == list(range(5))
    assert (report.delivered, report.undelivered, report.refused) == (5, 0, 0)


def test_an_outage_until_the_end_is_counted_and_close_returns():
    sink = Sink()
    notes: list[str] = []
    delivery = Delivery(sink, notes.append)
    submit_all(delivery, range(3))
    assert delivery.flush(5)
    sink.error = OutageError("gone")
    submit_all(delivery, range(7))
    began = time.perf_counter()
    report = delivery.close()
    assert time.perf_counter() - began < 2
    assert (report.delivered, report.undelivered, report.last_error) == (3, 7, "gone")
    assert len(notes) == 1


def test_a_refused_record_costs_only_itself():
    sink = Sink()
    notes: list[str] = []
    sink.error = OutageError("wait until all are queued")
    sink.poison = {4, 6}
    delivery = Delivery(sink, notes.append)
    submit_all(delivery, range(10))
    sink.error = None
    report = delivery.close()
    assert sink.taken == [0, 1, 2, 3, 5, 7, 8, 9]
    assert (report.delivered, report.undelivered, report.refused) == (8, 0, 2)
    assert report.last_error == "refused"
    assert sum("refused" in note for note in notes) == 1


def test_a_record_that_never_passes_does_not_hold_up_the_rest(monkeypatch):
    monkeypatch.setattr(delivery_module, "_MAX_ATTEMPTS", 3)

    class Picky(Sink):
        def send(self, records):
            if records[0].kind == "file":
                raise RuntimeError("too large")
            super().send(records)

    sink = Picky()
    delivery = Delivery(sink, lambda text: None)
    submit_all(delivery, ["file"], kind="file")
    submit_all(delivery, [1, 2])
    wait_for(lambda: sink.taken[-2:] == [1, 2], 5)  # 1 was sent before, to compare with
    report = delivery.close()
    assert (report.delivered, report.undelivered, report.refused) == (2, 0, 1)


def test_a_note_that_cannot_be_printed_does_not_end_the_delivery():
    sink = Sink()

    def broken(text):
        raise BrokenPipeError

    sink.poison = {0}
    delivery = Delivery(sink, broken)
    submit_all(delivery, ["a"], kind="file")
    submit_all(delivery, [0], kind="file")
    submit_all(delivery, ["b"], kind="file")
    assert delivery.close().refused == 1
    assert sink.taken == ["a", "b"]


@pytest.mark.slow
def test_a_store_that_fails_during_the_run_is_reported_at_close(
    tracking: TrackingConfig, monkeypatch
):
    notes: list[str] = []
    logger = RunLogger(tracking, run_name="failing", note=notes.append)
    logger.log_metrics({"a/b": 1.0}, step=0)
    logger.finalize()

    def fail(self, records):
        raise OutageError("server went away")

    monkeypatch.setattr(MlflowSink, "send", fail)
    for step in range(1, 10):
        logger.log_metrics({"a/b": 1.0}, step=step)
    logger.log_table([{"a": 1}], "samples/x.json")  # the table and its tag
    assert logger.close() == 12  # and the run's status
    assert logger.close() == 12
    assert len(notes) == 2
    assert "the run continues" in notes[0]
    assert "12 of 13 records were not delivered" in notes[1]
    assert "are lost" in notes[1]  # there was no journal
    assert "server went away" in notes[1]
