"""A run's journal that cannot be read, or was deleted while the run was going."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.tracking.trouble import Waiting, client_of, steps_of, wait_for
from vapo.config.schema import TrackingConfig
from vapo.tracking.delivery import Delivery, OutageError
from vapo.tracking.journal import Journal
from vapo.tracking.logger import RunLogger
from vapo.tracking.records import Record
from vapo.tracking.sink import MlflowSink


@pytest.mark.usefixtures("fast_retries")
def test_an_error_of_the_journal_does_not_end_the_delivery(tmp_path: Path, monkeypatch):
    notes: list[str] = []
    sink = Waiting()
    sink.away = False
    journal = Journal(tmp_path)
    tries = 0
    waiting = journal.waiting

    def broken():
        nonlocal tries
        tries += 1
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(journal, "waiting", broken)
    delivery = Delivery(sink, notes.append, journal)
    for number in range(3):
        delivery.submit(Record("tags", {"n": str(number)}))
    wait_for(lambda: tries > 3)
    assert sum("Input/output error" in note for note in notes) == 1
    monkeypatch.setattr(journal, "waiting", waiting)
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
    logger = RunLogger(own_store, run_name="x", journal=journal, note=notes.append)
    logger.log_metrics({"a": 0.0}, step=0)
    logger.finalize()
    send, is_away = MlflowSink.send, True

    def maybe(self, records):
        if is_away:
            raise OutageError("away")
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


def test_a_file_that_is_gone_costs_only_itself(tmp_path: Path):
    notes: list[str] = []
    journal = Journal(tmp_path)
    for record in (Record("file", b"a", "a.txt"), Record("file", b"b", "b.txt")):
        journal.append(record)
    next(path for path in tmp_path.glob("files/*") if path.read_text() == "a").unlink()
    sink = Waiting()
    sink.away = False
    report = Delivery(sink, notes.append, journal).close()
    assert (sink.taken, report.refused, report.undelivered) == ([b"b"], 1, 0)
    assert len(notes) == 1
    assert "its file is gone" in notes[0]


def test_a_journal_that_starts_over_overwrites_no_file(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.append(Record("params", {"lr": "1"}))
    for name in ("sent", "unsent"):
        journal.append(Record("file", name.encode(), name))
    journal.remove_oldest(2)
    journal.start_over(without=("params",))
    journal.append(Record("tags", {"a": "1"}))
    journal.append(Record("file", b"new", "new"))
    journal.append(Record("file", b"newer", "newer"))
    journal.close()
    again = Journal(tmp_path)
    assert len(again) == 4
    found = [record.payload for record in again.waiting() if record is not None]
    assert found == [b"unsent", {"a": "1"}, b"new", b"newer"]
