"""An MLflow run that is gone when its training is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tracking.trouble import client_of, interrupted, steps_of
from vapo.config.schema import TrackingConfig
from vapo.tracking.logger import RunLogger


@pytest.mark.slow
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
    logger = RunLogger(
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

    again = RunLogger(own_store, run_name="x", run_id=logger.run_id, journal=journal)
    assert again.run_id == logger.run_id  # the journal belongs to the new run now
    again.log_metrics({"a": 4.0}, step=4)
    assert again.close() == 0
    assert steps_of(own_store, logger.run_id) == [0, 1, 2, 3, 4]


def test_a_run_and_a_journal_that_are_gone_are_begun_anew(
    own_store: TrackingConfig, tracking: TrackingConfig, tmp_path: Path
):
    first = interrupted(tracking, None)
    logger = RunLogger(own_store, run_name="x", run_id=first.run_id, journal=tmp_path / "tracking")
    logger.log_config("lr: 2\n", {"lr": 2})
    logger.log_metrics({"a": 3.0}, step=3)
    assert logger.close() == 0
    assert steps_of(own_store, logger.run_id) == [3]
    assert logger.run_id is not None
    assert client_of(own_store).get_run(logger.run_id).data.params == {"lr": "2"}
