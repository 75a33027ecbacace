"""Records on disk: order, what a kill leaves, damage, a full disk, a resumed run."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests import forked
from tests.tracking import killed_run
from tests.tracking.killed_run import NUM_STEPS
from vapo.config.schema import TrackingConfig
from vapo.errors import UserError
from vapo.tracking.delivery import Delivery, OutageError, RefusedError
from vapo.tracking.journal import Journal, read_from
from vapo.tracking.journal_folders import JOURNAL_NAME
from vapo.tracking.logger import RunLogger
from vapo.tracking.records import Clock, InputData, Record
from vapo.tracking.sink import MlflowSink
from vapo.tracking.stores import locate_store

RECORDS = [
    Record("params", {"lr": "1e-6"}),
    Record("metrics", [["a/b", 0.1, 17, 3], ["c", 2.0, 17, 3]]),
    Record("file", "two\nlines, \u0663".encode(), "notes/a.txt"),
    Record("file", b"\x89PNG\n\x00", "figures/a.png"),
    Record("tags", {"k": "v"}),
    Record("inputs", [["n", "training", "d", 3, "s"]]),
    Record("status", ["FINISHED", 5]),
]


def journal_with(folder: Path, *records: Record) -> Journal:
    journal = Journal(folder)
    for record in records:
        journal.append(record)
    return journal


def test_what_is_written_is_what_another_process_reads(tmp_path: Path):
    journal_with(tmp_path, *RECORDS).close()
    assert list(Journal(tmp_path).waiting()) == RECORDS


def test_nan_is_nan_again(tmp_path: Path):
    journal_with(tmp_path, Record("metrics", [("a", math.nan, 1, 0)])).close()
    (record,) = Journal(tmp_path).waiting()
    assert record is not None
    assert math.isnan(record.payload[0][1])


def test_sent_records_are_not_sent_again_and_their_files_go(tmp_path: Path):
    journal = journal_with(tmp_path, *RECORDS)
    assert len(list((tmp_path / "files").glob("*"))) == 2
    journal.remove_oldest(3)
    journal.close()
    again = Journal(tmp_path)
    assert list(again.waiting()) == RECORDS[3:]
    assert len(list((tmp_path / "files").glob("*"))) == 1


def test_half_a_line_and_a_damaged_line(tmp_path: Path):
    journal_with(tmp_path, RECORDS[0], RECORDS[4]).close()
    path = tmp_path / "journal.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\x00\x00 damaged\n" + second + second[:9])
    journal = journal_with(tmp_path, RECORDS[6])  # the half line is cut before this one
    assert list(journal.waiting()) == [RECORDS[0], None, RECORDS[4], RECORDS[6]]
    assert list(journal.records()) == [RECORDS[0], RECORDS[4], RECORDS[6]]


def test_a_mark_beyond_the_journals_end_is_not_believed(tmp_path: Path):
    """After a power cut: the mark was on the disk, the lines were not. They are all sent again."""
    journal = journal_with(tmp_path, *RECORDS[4:])
    journal.remove_oldest(2)
    journal.close()
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    again = Journal(tmp_path)
    assert (len(again), list(again.waiting())) == (1, [RECORDS[4]])


def test_two_processes_do_not_share_a_journal(tmp_path: Path):
    journal = journal_with(tmp_path)
    with pytest.raises(UserError, match="is in use"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the run's records in .*file/j"):
        Journal(tmp_path / "file" / "j")


class Taking:
    def __init__(self) -> None:
        self.taken: list[Record] = []
        self.error: Exception | None = None

    def send(self, records):
        if self.error:
            raise self.error
        self.taken += records


@pytest.mark.parametrize("away", [False, True])
def test_a_full_disk_keeps_records_in_memory_in_order(tmp_path: Path, monkeypatch, away: bool):
    """Once there is room again, those that no store has taken are written."""
    notes: list[str] = []
    sink = Taking()
    sink.error = OutageError("away")
    journal = Journal(tmp_path)
    delivery = Delivery(sink, notes.append, journal)
    records = [Record("tags", {"n": str(n)}) for n in range(6)]
    delivery.submit(records[0])
    write = journal._write

    def full(record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "_write", full)
    for record in records[1:4]:
        delivery.submit(record)
    assert sum("No space left" in note for note in notes) == 1
    assert journal.num_in_process == 3
    monkeypatch.setattr(journal, "_write", write)
    for record in records[4:]:
        delivery.submit(record)
    sink.error = OutageError("away") if away else None
    report = delivery.close()
    journal.close()
    assert sink.taken == ([] if away else records)
    assert (report.delivered, report.undelivered, report.num_lost) == (
        (0, 6, 0) if away else (6, 0, 0)
    )
    assert list(Journal(tmp_path).waiting()) == (records if away else [])


def test_a_refused_record_is_kept_aside_with_the_reason(tmp_path: Path):
    class Picky(Taking):
        def send(self, records):
            if records[0].name == "notes/a.txt":
                raise RefusedError("too long")
            super().send(records)

    sink = Picky()
    delivery = Delivery(sink, lambda text: None, journal_with(tmp_path, *RECORDS))
    report = delivery.close()
    assert (report.delivered, report.undelivered, report.refused) == (6, 0, 1)
    (line,) = (tmp_path / "refused.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "too long"
    kept = tmp_path / json.loads(json.loads(line)["record"])["payload"]
    assert kept.read_text().startswith("two\nlines")
    assert len(Journal(None)) == 0


def test_the_clock_never_gives_a_time_twice():
    clock = Clock()
    times = [clock.now_ms() for _ in range(1000)]
    assert times == sorted(set(times))
    clock.after(times[-1] + 10**9)
    assert clock.now_ms() == times[-1] + 10**9 + 1


# ---- with the real store ------------------------------------------------------------------


def killed(tracking: TrackingConfig, folder: Path, when: str) -> str:
    """The id of a run whose records are in the folder's journal."""
    log, journal = folder / "log.txt", folder / "tracking"
    process = forked.start(log, {}, killed_run.main, tracking.uri, str(journal), when)
    assert forked.end(process, timeout_s=240) == -9, log.read_text()
    return log.read_text().splitlines()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", ["sent, not marked", pytest.param("not sent", marks=pytest.mark.kills)]
)
def test_a_killed_runs_records_arrive_once_when_it_resumes(tracking, tmp_path: Path, when: str):
    journal = tmp_path / "tracking"
    run_id = killed(tracking, tmp_path, when)
    client = MlflowClient(locate_store(tracking.uri).uri)
    sent_before = len(client.get_metric_history(run_id, "a"))
    assert (sent_before > 0) == (when == "sent, not marked")
    notes: list[str] = []
    logger = RunLogger(tracking, run_name="x", run_id=run_id, journal=journal, note=notes.append)
    assert "records of the interrupted run are sent now" in notes[0]
    assert logger.recorded_steps == {"a": NUM_STEPS - 1, "b": NUM_STEPS - 1}
    logger.skip_recorded()
    for step in range(NUM_STEPS - 5, NUM_STEPS + 5):
        logger.log_metrics({"a": step / 7, "b": 1.0, "new": 0.0}, step=step)
    logger.log_table([{"row": 2}], "samples/two.json")
    assert logger.close() == 0
    history = client.get_metric_history(run_id, "a")
    assert [(p.step, p.value) for p in history] == [(s, s / 7) for s in range(NUM_STEPS + 5)]
    assert [p.step for p in client.get_metric_history(run_id, "b")] == list(range(NUM_STEPS + 5))
    assert len(client.get_metric_history(run_id, "new")) == 10
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert [t["path"] for t in json.loads(run.data.tags["mlflow.loggedArtifacts"])] == [
        "samples/one.json",
        "samples/two.json",
    ]
    assert {a.path for a in client.list_artifacts(run_id)} == {"notes", "samples"}


def test_a_row_that_is_sent_twice_is_stored_once(tracking):
    logger = RunLogger(tracking, run_name="twice")
    assert logger.run_id is not None
    client = MlflowClient(locate_store(tracking.uri).uri)
    sink = MlflowSink(client, logger.run_id)
    rows = [("a", 0.1, 1000 + step, step) for step in range(3)]
    for upto in (2, 3, 1):
        sink.send([Record("metrics", rows[:upto])])
    data = Record("inputs", [InputData("n", "training", "d", 3, "s")])
    sink.send([data])
    sink.send([data])
    assert [p.step for p in client.get_metric_history(logger.run_id, "a")] == [0, 1, 2]
    assert len(client.get_run(logger.run_id).inputs.dataset_inputs) == 1
    sink.send([Record("metrics", [("a", 0.1, 1003, 2)])])  # another time: another row
    assert len(client.get_metric_history(logger.run_id, "a")) == 4
    logger.close()


def test_another_runs_journal_is_set_aside(tracking, tmp_path: Path):
    journal = tmp_path / "tracking"
    earlier = journal_with(journal, *RECORDS)
    earlier.bind(locate_store(tracking.uri).shown_uri, "0123456789abcdef")
    earlier.close()
    notes: list[str] = []
    logger = RunLogger(tracking, run_name="x", journal=journal, note=notes.append)
    logger.close()
    logger.discard_journal()
    assert not journal.exists()
    assert str(tmp_path / "tracking-0123456789ab") in notes[0]
    assert next(Journal(tmp_path / "tracking-0123456789ab").waiting()) == RECORDS[0]


def test_the_clock_starts_behind_what_was_recorded(tracking, tmp_path: Path):
    """The host's clock went back: a time given twice would be two rows of one step, or one lost."""
    later = 10**14
    first = RunLogger(tracking, run_name="x", journal=tmp_path)
    first.close("FAILED")
    journal_with(tmp_path, Record("metrics", [("a", 0.5, later, 7)])).close()
    logger = RunLogger(tracking, run_name="x", run_id=first.run_id, journal=tmp_path)
    assert logger.run_id is not None
    assert dict(logger.recorded_steps) == {"a": 7}
    logger.log_metrics({"a": 0.5}, step=8)
    assert logger.close() == 0
    client = MlflowClient(locate_store(tracking.uri).uri)
    earlier, point = client.get_metric_history(logger.run_id, "a")
    assert (earlier.step, earlier.timestamp, point.step) == (7, later, 8)
    assert point.timestamp > later


def test_a_resumed_run_skips_what_was_recorded(tracking, tmp_path: Path):
    first = RunLogger(tracking, run_name="x", journal=tmp_path / "tracking")
    for step in range(4):
        first.log_metrics({"a[1]": float(step)}, step=step)
    first.close("FAILED")
    logger = RunLogger(tracking, run_name="x", run_id=first.run_id, journal=tmp_path / "tracking")
    assert dict(logger.recorded_steps) == {"a_1_": 3}
    logger.log_metrics({"a[1]": 33.0}, step=3)  # not skipped before it is asked for
    logger.skip_recorded()
    for step in range(2, 6):
        logger.log_metrics({"a[1]": float(step), "b": 0.5}, step=step)
    logger.close()
    assert logger.run_id is not None
    client = MlflowClient(locate_store(tracking.uri).uri)
    values = [(p.step, p.value) for p in client.get_metric_history(logger.run_id, "a_1_")]
    assert values == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (3, 33.0), (4, 4.0), (5, 5.0)]
    assert [p.step for p in client.get_metric_history(logger.run_id, "b")] == [2, 3, 4, 5]


def test_another_process_reads_on_where_it_stopped(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, *RECORDS[:2])
    found, end = read_from(tmp_path)
    assert [record.kind for record in found] == ["params", "metrics"]
    assert found[1].payload == RECORDS[1].payload
    assert read_from(tmp_path, end) == ([], end)
    journal.append(RECORDS[4])
    with (tmp_path / JOURNAL_NAME).open("ab") as file:
        file.write(b'{"kind": "tags", "pay')
    found, after = read_from(tmp_path, end)
    assert [record.payload for record in found] == [{"k": "v"}], "and not half a line"
    with (tmp_path / JOURNAL_NAME).open("ab") as file:
        file.write(b'load": {"l": "m"}, "name": ""}\n')
    assert [record.payload for record in read_from(tmp_path, after)[0]] == [{"l": "m"}]
    journal.close()
    (tmp_path / JOURNAL_NAME).write_bytes(b"")
    assert read_from(tmp_path, after) == ([], 0), "it was begun anew"
    with pytest.raises(FileNotFoundError):
        read_from(tmp_path / "nowhere")


def test_steps_below_0_arrive_and_a_resumed_run_skips_those_it_has(tracking, tmp_path: Path):
    """Value pretraining of three minibatches, killed after the second; then the policy."""
    first = RunLogger(tracking, run_name="x", journal=tmp_path / "tracking")
    first.policy_begins_at = 3
    first.log_metrics({"score": 0.25}, step=3)
    for step in (1, 2):
        first.log_metrics({"loss": float(step)}, step=step)
    first.close("FAILED")
    logger = RunLogger(tracking, run_name="x", run_id=first.run_id, journal=tmp_path / "tracking")
    assert dict(logger.recorded_steps) == {"score": 0, "loss": -1}
    assert logger.first_recorded_step == -2
    logger.policy_begins_at = 3
    logger.skip_recorded()
    for step in range(2, 6):
        logger.log_metrics({"loss": float(step), "new": 0.5}, step=step)
    assert logger.close() == 0
    assert logger.run_id is not None
    client = MlflowClient(locate_store(tracking.uri).uri)

    def history(key: str) -> list[tuple[int, float]]:
        return sorted((p.step, p.value) for p in client.get_metric_history(logger.run_id, key))

    assert history("loss") == [(-2, 1.0), (-1, 2.0), (0, 3.0), (1, 4.0), (2, 5.0)]
    assert [step for step, _ in history("new")] == [-1, 0, 1, 2]
    assert history("score") == [(0, 0.25)]
    assert client.get_run(logger.run_id).data.metrics == {"loss": 5.0, "new": 0.5, "score": 0.25}
