"""`vapo deliver`: what a store did not take is sent by hand, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from vapo.cli import main
from vapo.config.schema import TrackingConfig
from vapo.tracking.delivery import DeliveryReport, OutageError
from vapo.tracking.journal import Journal
from vapo.tracking.logger import RunLogger
from vapo.tracking.records import Record
from vapo.tracking.sink import MlflowSink
from vapo.tracking.stores import Store, locate_store, what_was_not_sent


@pytest.fixture
def undelivered(tracking: TrackingConfig, tmp_path: Path, monkeypatch) -> tuple[Path, str]:
    """The folder of a run whose store went away, and the run's id."""
    notes: list[str] = []
    logger = RunLogger(tracking, run_name="x", journal=tmp_path / "tracking", note=notes.append)
    logger.log_metrics({"a": 0.0}, step=0)
    logger.finalize()

    def fail(self, records):
        raise OutageError("server went away")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowSink, "send", fail)
        for step in (1, 2):
            logger.log_metrics({"a": step / 3}, step=step)
        logger.log_text("hello", "notes/a.txt")
        assert logger.close() == 4
    assert "4 of 5 records were not delivered" in notes[1]
    assert notes[2].strip() == f"vapo deliver {tmp_path}"
    assert logger.run_id is not None
    return tmp_path, logger.run_id


def test_lists_sends_and_has_nothing_left_to_send(undelivered, tracking, capsys):
    folder, run_id = undelivered
    assert main(["deliver", str(folder), "--list"]) == 0
    assert "4 records (2 metrics, 1 file, 1 status)" in capsys.readouterr().out
    client = MlflowClient(locate_store(tracking.uri).uri)
    assert client.get_run(run_id).info.status == "RUNNING"
    assert main(["deliver", str(folder)]) == 0
    assert f"run {run_id}: 4 sent" in capsys.readouterr().out
    history = client.get_metric_history(run_id, "a")
    assert [(p.step, p.value) for p in history] == [(0, 0.0), (1, 1 / 3), (2, 2 / 3)]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert main(["deliver", str(folder)]) == 0
    assert "nothing to send" in capsys.readouterr().out
    assert len(client.get_metric_history(run_id, "a")) == 3


def test_a_store_that_is_still_away(undelivered, capsys):
    folder, _ = undelivered
    arguments = ["deliver", str(folder), "--tracking_uri", "http://me:secret@127.0.0.1:9"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "no usable MLflow store at http://127.0.0.1:9" in error
    assert "secret" not in error
    assert len(Journal(folder / "tracking")) == 4


def test_folders_that_have_nothing_to_send(tmp_path, capsys):
    assert main(["deliver", str(tmp_path)]) == 2
    assert "has no records waiting" in capsys.readouterr().err
    assert main(["deliver", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["deliver"]) == 2


def test_a_run_that_is_still_going(undelivered, capsys):
    folder, _ = undelivered
    journal = Journal(folder / "tracking")
    assert main(["deliver", str(folder)]) == 2
    assert "is in use" in capsys.readouterr().err
    journal.close()


def test_a_password_is_left_for_the_user_to_add(tmp_path):
    store = Store("https://me:secret@host:5000/x")
    lines = what_was_not_sent(DeliveryReport(1, 2, 1, "gone"), tmp_path / "tracking", store)
    assert lines[1].startswith(f"  vapo deliver {tmp_path}")
    assert lines[1].endswith("in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
    assert "refused 1 records" in lines[2]
    assert not any("secret" in line for line in lines)
    journal = Journal(tmp_path / "tracking")
    journal.bind(store.shown_uri, "0123456789abcdef")
    journal.close()
    assert json.loads((tmp_path / "tracking/target.json").read_text()) == {
        "tracking_uri": "https://host:5000/x",
        "mlflow_run_id": "0123456789abcdef",
    }


def test_sent_records_are_removed_from_the_count(undelivered):
    folder, _ = undelivered
    journal = Journal(folder / "tracking")
    kinds = [record.kind for record in journal.waiting() if record]
    assert kinds == ["metrics", "metrics", "file", "status"]
    journal.append(Record("tags", {}))
    assert len(journal) == 5
    journal.close()
