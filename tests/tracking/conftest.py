import shutil
from pathlib import Path

import pytest

from vapo.config.schema import TrackingConfig
from vapo.tracking import delivery as delivery_module
from vapo.tracking.logger import RunLogger


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> TrackingConfig:
    """A real SQLite store, made once: its tables take seconds."""
    folder = tmp_path_factory.mktemp("store") / "mlruns"
    config = TrackingConfig(uri=str(folder), experiment="tests", tags={"who": "config"})
    notes: list[str] = []
    RunLogger(config, run_name="first", note=notes.append).close()
    assert len(notes) == 1
    assert "creating the tracking store" in notes[0]
    assert (folder / "mlflow.db").is_file()
    assert not Path("mlflow.db").exists()
    return config


@pytest.fixture
def own_store(tracking: TrackingConfig, tmp_path: Path) -> TrackingConfig:
    """A store of the test's own, which it may break."""
    folder = tmp_path / "mlruns"
    folder.mkdir()
    shutil.copy(Path(tracking.uri) / "mlflow.db", folder)
    return TrackingConfig(uri=str(folder), experiment="alone")


@pytest.fixture
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "_MAX_ATTEMPTS", 3)
    monkeypatch.setattr(delivery_module, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(delivery_module, "_LONGEST_RETRY_S", 0.02)
