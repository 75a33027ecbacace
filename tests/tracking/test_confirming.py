"""A store that says it took records, and has not: they are sent again, and else they are left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from vapo.config.schema import TrackingConfig
from vapo.tracking import delivery as delivery_module
from vapo.tracking.confirming import missing_records
from vapo.tracking.delivery import Delivery
from vapo.tracking.journal import Journal
from vapo.tracking.records import InputData, Record
from vapo.tracking.sink import MlflowSink
from vapo.tracking.stores import locate_store, what_was_not_sent

INPUT = InputData("rows", "training", "abc", 3, "{}")
RECORDS = [
    Record("params", {f"p{i}": "1" for i in range(3)}),
    Record("inputs", [INPUT]),
    Record("tags", {"who": "me"}),
    *[Record("metrics", [["loss", 0.5, 100 + i, i], ["lr", 0.1, 100 + i, i]]) for i in range(5)],
    Record("metrics", [["eval", 1.0, 200, 4]]),
    Record("note", "held-out avg@8"),
    Record("file", b"text", "samples/a.json"),
    Record("status", ["FINISHED", 300]),
]


class Swallowing:
    """A sink behind a proxy that for some sends answers as if it had passed them on."""

    def __init__(self, sink: MlflowSink, swallows: Any) -> None:
        self.sink, self.swallows, self.num_sends = sink, swallows, 0

    def send(self, records: Sequence[Record]) -> None:
        self.num_sends += 1
        if not self.swallows(self.num_sends, records):
            self.sink.send(records)


@pytest.fixture
def client(tracking: TrackingConfig) -> MlflowClient:
    return MlflowClient(locate_store(tracking.uri).uri)


@pytest.fixture
def run_id(client: MlflowClient) -> str:
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    return str(client.create_run(experiment.experiment_id).info.run_id)


def deliver(
    client: MlflowClient, run_id: str, folder: Path, swallows: Any
) -> tuple[Any, list[str]]:
    """The report and the notes of a delivery of `RECORDS`."""
    notes: list[str] = []
    sink, journal = MlflowSink(client, run_id), Journal(folder)
    delivery = Delivery(Swallowing(sink, swallows), notes.append, journal, missing=sink.missing)
    for record in RECORDS:
        delivery.submit(record)
        delivery.flush(10)
    report = delivery.close()
    journal.close()
    return report, notes


def is_complete(client: MlflowClient, run_id: str) -> bool:
    run = client.get_run(run_id)
    rows = [(row.step, row.timestamp) for row in client.get_metric_history(run_id, "loss")]
    return (
        rows == [(i, 100 + i) for i in range(5)]
        and run.data.params.keys() >= {"p0", "p1", "p2"}
        and (run.data.tags.get("who"), run.info.status) == ("me", "FINISHED")
        and [one.dataset.name for one in run.inputs.dataset_inputs] == ["rows"]
    )


def test_what_was_swallowed_is_sent_again(
    client: MlflowClient, run_id: str, tmp_path: Path
) -> None:
    lost = {1, 3, 5, 6, len(RECORDS)}
    report, notes = deliver(client, run_id, tmp_path, lambda number, _: number in lost)
    assert is_complete(client, run_id)
    assert (report.delivered, report.undelivered) == (len(RECORDS), 0)
    assert notes == ["tracking: the store does not have 5 records that it said it took"]


def test_a_store_that_has_everything_is_asked_once(
    client: MlflowClient, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for a key of each record alone."""
    asked: list[str] = []
    history = MlflowClient.get_metric_history

    def get_history(self: MlflowClient, run_id: str, key: str) -> Any:
        asked.append(key)
        return history(self, run_id, key)

    monkeypatch.setattr(MlflowClient, "get_metric_history", get_history)
    report, notes = deliver(client, run_id, tmp_path, lambda *_: False)
    assert (report.delivered, report.undelivered, notes) == (len(RECORDS), 0, [])
    assert asked == ["loss", "eval"]


def test_what_is_swallowed_always_is_left_for_later(
    client: MlflowClient, run_id: str, tmp_path: Path
) -> None:
    report, notes = deliver(client, run_id, tmp_path, lambda *_: True)
    assert report.last_error == "the store says that it takes records, and does not have them"
    assert report.undelivered == len(RECORDS) - 1
    assert report.delivered == 1, "the artifact, which cannot be sent again"
    assert report.missing_files == ("samples/a.json",)
    lines = what_was_not_sent(report, tmp_path, locate_store("http://host"))
    assert lines[2].endswith("does not have artifacts that it took: samples/a.json")
    assert notes == ["tracking: the store does not have 12 records that it said it took"]
    journal = Journal(tmp_path)
    sink = MlflowSink(client, run_id)
    later = Delivery(sink, pytest.fail, journal).close(while_it_moves=True)
    journal.close()
    assert (later.delivered, later.undelivered) == (len(RECORDS) - 1, 0)
    assert is_complete(client, run_id)


def test_a_refused_record_is_not_missed(client: MlflowClient, run_id: str, tmp_path: Path) -> None:
    sink, journal = MlflowSink(client, run_id), Journal(tmp_path)
    delivery = Delivery(sink, lambda _: None, journal, missing=sink.missing)
    for number in range(2):
        delivery.submit(Record("metrics", [["a", 1.0, 100 + number, 0]]))
        delivery.submit(Record("params", {"p": str(number)}))  # another value: refused
    report = delivery.close()
    assert (report.delivered, report.undelivered, report.refused) == (3, 0, 1)
    assert [record.kind for record in journal.sent_records()] == ["metrics", "params", "metrics"]
    journal.close()


def test_a_store_that_cannot_be_asked(tmp_path: Path) -> None:
    def missing(records: Sequence[Record]) -> list[Record]:
        raise OSError("gone")

    class Taking:
        def send(self, records: Sequence[Record]) -> None:
            pass

    notes: list[str] = []
    delivery = Delivery(Taking(), notes.append, Journal(tmp_path), missing=missing)
    delivery.submit(RECORDS[0])
    assert delivery.close().undelivered == 0
    assert notes == ["tracking: the store was not asked for what it has of the run: gone"]


def test_what_one_record_logs_is_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow parts requests of more than a thousand values."""
    sizes: list[int] = []

    class Counting:
        def send(self, records: Sequence[Record]) -> None:
            sizes.append(sum(len(record.payload) for record in records))

    monkeypatch.setattr(delivery_module, "_MAX_METRICS", 10)
    delivery = Delivery(Counting(), pytest.fail)
    for number in (4, 4, 4, 25, 1):
        delivery.submit(Record("metrics", [["a", 1.0, 1, 1]] * number))
    assert delivery.close().delivered == 5
    assert sum(sizes) == 38
    assert sorted(sizes)[-1] == 25
    assert all(size <= 10 for size in sizes if size != 25)


def test_a_run_without_anything(client: MlflowClient, run_id: str) -> None:
    assert missing_records(client, run_id, []) == []
    status = [Record("status", ["RUNNING", 1]), Record("status", ["FINISHED", 2])]
    assert missing_records(client, run_id, status) == status[1:]
