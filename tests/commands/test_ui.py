import os
import socket
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.tracking.ready_stores import ready_store
from vapo.commands import ui
from vapo.config.schema import TrackingConfig
from vapo.errors import UserError
from vapo.tracking.logger import RunLogger


@pytest.fixture(autouse=True)
def called(monkeypatch):
    """The command that would have replaced this process."""
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: calls.append((path, command)))
    return calls


@pytest.fixture
def store(tmp_path):
    (tmp_path / "mlflow.db").write_bytes(b"")
    return tmp_path


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_becomes_the_server_of_the_folders_database(store, free_port, called, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "true")
    ui.run(str(store), "127.0.0.1", free_port)
    ((path, command),) = called
    assert path == sys.executable
    assert command[:4] == [sys.executable, "-m", "mlflow", "server"]
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert options == {
        "--backend-store-uri": f"sqlite:///{store}/mlflow.db",
        "--default-artifact-root": f"file://{store}/artifacts",
        "--host": "127.0.0.1",
        "--port": str(free_port),
        "--workers": "1",
    }
    assert f"http://127.0.0.1:{free_port}/" in capsys.readouterr().out


def test_a_missing_store_is_an_error(tmp_path, free_port):
    with pytest.raises(UserError, match="nothing is recorded"):
        ui.run(str(tmp_path / "nowhere"), "127.0.0.1", free_port)
    assert not Path(tmp_path / "nowhere").exists()


def test_a_taken_port_is_an_error(store):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            ui.run(str(store), "127.0.0.1", port)


def test_a_server_has_its_own_ui(free_port):
    with pytest.raises(UserError, match="a UI of its own"):
        ui.run("http://127.0.0.1:5000", "127.0.0.1", free_port)


def test_a_run_is_opened_at_its_charts_in_the_view_for_training(
    tmp_path, free_port, called, capsys
):
    uri = str(ready_store(tmp_path / "mlruns"))
    with RunLogger(TrackingConfig(uri=uri, experiment="x"), run_name="one") as logger:
        pass
    client = MlflowClient(f"sqlite:///{uri}/mlflow.db")
    tags = client.get_experiment(logger.experiment_id).tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    ui.run(uri, "127.0.0.1", free_port, run=logger.run_id)
    assert called
    assert (
        f"http://127.0.0.1:{free_port}/#/experiments/{logger.experiment_id}/runs/{logger.run_id}"
        "/model-metrics?workflowType=machine_learning\n"
    ) in capsys.readouterr().out
    with pytest.raises(UserError, match="has no run 0123"):
        ui.run(uri, "127.0.0.1", free_port, run="0123")


def test_an_experiments_own_kind_stays(tmp_path):
    uri = str(ready_store(tmp_path / "mlruns"))
    client = MlflowClient(f"sqlite:///{uri}/mlflow.db")
    for name, kind in (("old", {}), ("own", {"mlflow.experimentKind": "genai_development"})):
        experiment_id = client.create_experiment(name, f"file://{tmp_path}/a", kind)
        RunLogger(TrackingConfig(uri=uri, experiment=name), run_name="x").close()
        expected = kind.get("mlflow.experimentKind", "custom_model_development")
        assert client.get_experiment(experiment_id).tags["mlflow.experimentKind"] == expected
