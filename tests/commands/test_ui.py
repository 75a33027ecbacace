import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from tests.builders import free_port
from tests.tracking.ready_stores import ready_store
from vapo.commands import ui
from vapo.config.schema import TrackingConfig
from vapo.errors import UserError
from vapo.tracking.logger import RunLogger
from vapo.tracking.stores import locate_store

SERVER = """
import os, pathlib, signal, sys, time
mark = pathlib.Path(sys.argv[1])
is_own_session = os.getsid(0) == os.getpid()  # no Ctrl-C of the terminal reaches it
said = os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"], is_own_session
said += os.environ.get("MLFLOW_REGISTRY_STORE_URI", "")[:6], os.environ.get("PYTHONWARNINGS")
mark.with_suffix(".new").write_text(str(said))
mark.with_suffix(".new").rename(mark)
sys.exit(int(sys.argv[2])) if len(sys.argv) > 2 else time.sleep(60)
"""


def stand_in(monkeypatch, mark, *more):
    """A process in the place of MLflow's server, which starts in ten seconds."""
    command = [sys.executable, "-c", SERVER, str(mark), *more]
    monkeypatch.setattr(ui, "server_command", lambda *_: command)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "mlflow.db").write_bytes(b"")
    return tmp_path


@pytest.fixture
def port():
    return free_port()


def test_the_server_of_the_folders_database(store):
    command = ui.server_command(locate_store(str(store)), "127.0.0.1", 5001)
    assert command[:5] == [sys.executable, "-P", "-m", "mlflow", "server"]
    options = dict(zip(command[5::2], command[6::2], strict=True))
    assert options == {
        "--backend-store-uri": f"sqlite:///{store}/mlflow.db",
        "--default-artifact-root": f"file://{store}/artifacts",
        "--host": "127.0.0.1",
        "--port": "5001",
        "--workers": "1",
        "--uvicorn-opts": f"--log-level=warning --app-dir={sysconfig.get_path('stdlib')}",
        "--allowed-hosts": "localhost:5001,127.0.0.1:5001,[::1]:5001",
        "--cors-allowed-origins": "http://localhost:5001,http://127.0.0.1:5001,http://[::1]:5001",
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_server_quietly(store, port, monkeypatch, capfd, number):
    mark = store / "up"
    stand_in(monkeypatch, mark)
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "true")
    servers: list[psutil.Process] = []
    others = set(psutil.Process().children())  # of other tests

    def interrupt():
        while not mark.exists():
            time.sleep(0.01)
        servers.extend(set(psutil.Process().children()) - others)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=interrupt)
    thread.start()
    ui.run(str(store), "127.0.0.1", port)
    thread.join()
    assert mark.read_text() == str(
        ("false", True, "sqlite", "ignore:starlette.middleware.wsgi is deprecated")
    )
    assert servers
    assert not any(server.is_running() for server in servers)
    assert signal.getsignal(number) is before
    out, err = capfd.readouterr()
    assert f"http://127.0.0.1:{port}/" in out
    assert err == ""


def test_a_server_that_ends_by_itself_is_an_error(store, port, monkeypatch):
    stand_in(monkeypatch, store / "up", "3")
    with pytest.raises(UserError, match="ended with exit code 3"):
        ui.run(str(store), "127.0.0.1", port)


def test_a_missing_store_is_an_error(tmp_path, port):
    with pytest.raises(UserError, match="nothing is recorded"):
        ui.run(str(tmp_path / "nowhere"), "127.0.0.1", port)
    assert not Path(tmp_path / "nowhere").exists()


def test_a_taken_port_is_an_error(store):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}") as raised:
            ui.run(str(store), "127.0.0.1", port)
    assert (
        "if the same store is already served there, open "
        f"http://127.0.0.1:{port}/#/experiments?workflowType=machine_learning; or choose another"
    ) in str(raised.value)
    with pytest.raises(UserError, match="cannot listen on") as raised:
        ui.run(str(store), "192.0.2.1", port)  # an address of no host
    assert "already served" not in str(raised.value)


def test_a_server_has_its_own_ui(port):
    with pytest.raises(UserError, match="a UI of its own"):
        ui.run("http://127.0.0.1:5000", "127.0.0.1", port)


def test_a_run_is_opened_at_its_charts_in_the_view_for_training(
    tmp_path, port, monkeypatch, capsys
):
    uri = str(ready_store(tmp_path / "mlruns"))
    with RunLogger(TrackingConfig(uri=uri, experiment="x"), run_name="one") as logger:
        pass
    stand_in(monkeypatch, tmp_path / "up", "0")
    ui.run(uri, "127.0.0.1", port, run=logger.run_id)
    runs = f"http://127.0.0.1:{port}/#/experiments/{logger.experiment_id}/runs"
    view = "?workflowType=machine_learning"
    out = capsys.readouterr().out
    charts, table, alone = out.splitlines()[-3:]
    assert charts.startswith(f"  {runs}{view}&compareRunsMode=CHART&viewStateShareKey=vapo (")
    assert table.startswith(f"  {runs}{view}&viewStateShareKey=vapo (")
    assert alone.startswith(f"  {runs}/{logger.run_id}/model-metrics{view} (")
    with pytest.raises(UserError, match="has no run 0123: give the id that `vapo fit`") as error:
        ui.run(uri, "127.0.0.1", port, run="0123")
    assert "any more" not in str(error.value)
    MlflowClient(f"sqlite:///{uri}/mlflow.db").delete_run(logger.run_id)
    with pytest.raises(UserError, match=r"[0-9a-f]{32} was deleted: restore it, or give"):
        ui.run(uri, "127.0.0.1", port, run=logger.run_id)


def test_a_sweep_is_opened_at_its_runs_and_not_their_parent_alone(
    tmp_path, port, monkeypatch, capsys
):
    uri = str(ready_store(tmp_path / "mlruns"))
    with RunLogger(TrackingConfig(uri=uri, experiment="x"), run_name="sweep") as logger:
        pass
    client = MlflowClient(f"sqlite:///{uri}/mlflow.db")
    tags = {"mlflow.parentRunId": logger.run_id, "role": "row"}
    child = client.create_run(logger.experiment_id, tags=tags).info.run_id
    stand_in(monkeypatch, tmp_path / "up", "0")
    ui.run(uri, "127.0.0.1", port, run=logger.run_id)
    out = capsys.readouterr().out
    table, curves = out.splitlines()[-2:]
    runs = f"http://127.0.0.1:{port}/#/experiments/{logger.experiment_id}/runs"
    assert table.startswith(f"  {runs}/{logger.run_id}/overview?workflowType=machine_learning (")
    assert curves.startswith(f"  http://127.0.0.1:{port}/#/metric?runs=%5B%22{child}%22%5D&")
    assert "compareRunsMode" not in out


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_run_id_is_refused_by_its_name(store, port, empty):
    with pytest.raises(UserError, match="--run: the run's id is empty"):
        ui.run(str(store), "127.0.0.1", port, run=empty)
