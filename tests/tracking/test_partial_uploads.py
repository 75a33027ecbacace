"""What a kill leaves among MLflow's artifacts."""

from __future__ import annotations

from pathlib import Path

from tests.tracking.trouble import interrupted
from vapo.cli import main
from vapo.config.schema import TrackingConfig
from vapo.tracking.delivery import OutageError
from vapo.tracking.logger import RunLogger
from vapo.tracking.sink import MlflowSink
from vapo.tracking.stores import locate_store


def away(self: MlflowSink, records: object) -> None:
    raise OutageError("away")


def leave_upload(config: TrackingConfig, run_id: str | None) -> Path:
    """As MLflow's copy to an artifact leaves it when the process is killed."""
    folder = locate_store(config.uri).artifact_folder(run_id, "samples")
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".artifact.uploading.x1y2z3"
    path.write_text("half")
    return path


def test_a_resumed_run_removes_the_uploads_that_a_kill_left(own_store, tmp_path: Path):
    first = interrupted(own_store, tmp_path / "tracking")
    left = leave_upload(own_store, first.run_id)
    logger = RunLogger(own_store, run_name="x", run_id=first.run_id, journal=tmp_path / "tracking")
    assert not left.exists()
    assert (left.parent / "one.json").is_file()
    logger.close()


def test_deliver_removes_the_uploads_that_a_kill_left(own_store, tmp_path: Path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(MlflowSink, "send", away)
        first = interrupted(own_store, tmp_path / "tracking")
    left = leave_upload(own_store, first.run_id)
    assert main(["deliver", str(tmp_path)]) == 0
    assert not left.exists()
    left = leave_upload(own_store, first.run_id)
    assert main(["deliver", str(tmp_path)]) == 0  # also where there is nothing to send
    assert not left.exists()
