"""A real MLflow server that is stopped and started again under a run."""

from __future__ import annotations

import http.server
import threading
import time
from pathlib import Path

import pytest
import requests
from mlflow import MlflowClient

from tests.tracking.mlflow_server import Server
from vapo.cli import main
from vapo.config.schema import TrackingConfig
from vapo.tracking import delivery as delivery_module
from vapo.tracking.logger import RunLogger
from vapo.tracking.records import InputData
from vapo.tracking.stores import locate_store


def log_steps(logger: RunLogger, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"actor/entropy": step / 7, "critic/value_loss": 1.0}, step=step)
        time.sleep(0.01)
    logger.log_text(f"up to {steps.stop}", f"notes/{steps.stop}.txt")


@pytest.mark.attacks
def test_metrics_of_an_outage_arrive_in_order_and_once(
    request, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(delivery_module, "_LONGEST_RETRY_S", 2.0)
    server = Server(tmp_path)
    request.addfinalizer(server.stop)
    server.start()
    notes: list[str] = []
    config = TrackingConfig(uri=server.uri)
    run_dir = tmp_path / "run"
    logger = RunLogger(config, run_name="outage", note=notes.append, journal=run_dir / "tracking")
    assert logger.run_id is not None
    log_steps(logger, range(100))
    logger.finalize()
    server.stop()
    began = time.monotonic()
    log_steps(logger, range(100, 200))
    assert time.monotonic() - began < 30  # the run does not wait for the server
    server.start()
    log_steps(logger, range(200, 300))
    deadline = time.monotonic() + 60
    while not any("takes records again" in note for note in notes):
        assert time.monotonic() < deadline, notes
        time.sleep(0.1)
    logger.finalize()
    server.stop()
    log_steps(logger, range(300, 400))  # down until after the end
    left = logger.close()
    assert left == 102  # 100 steps, a text, the run's status
    assert f"vapo deliver {run_dir}" in notes[-1]

    assert main(["deliver", str(run_dir)]) == 2  # still down
    server.start()
    assert main(["deliver", str(run_dir)]) == 0
    assert main(["deliver", str(run_dir)]) == 0
    assert "View run" not in capsys.readouterr().out, "MLflow's own link, to another view"
    client = MlflowClient(locate_store(server.uri).uri)
    for key, value in (("actor/entropy", None), ("critic/value_loss", 1.0)):
        history = client.get_metric_history(logger.run_id, key)
        assert [p.step for p in history] == list(range(400))
        assert [p.value for p in history] == [s / 7 if value is None else value for s in range(400)]
        times = [p.timestamp for p in history]
        assert times == sorted(set(times))
    assert client.get_run(logger.run_id).info.status == "FINISHED"
    names = {artifact.path for artifact in client.list_artifacts(logger.run_id, "notes")}
    assert names == {f"notes/{end}.txt" for end in (100, 200, 300, 400)}


class Swallowing(http.server.BaseHTTPRequestHandler):
    """A proxy; while it `swallows`, it answers `{}` to what would change the record."""

    behind = ""
    swallows = False

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = 200, b"{}"
        if self.command == "GET" or not type(self).swallows:
            headers = {k: v for k, v in self.headers.items() if k not in ("Host", "Connection")}
            headers["Accept-Encoding"] = "identity"
            url = self.behind + self.path
            passed = requests.request(self.command, url, data=body, headers=headers, timeout=30)
            status, answer = passed.status_code, passed.content
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_PATCH = _pass_on

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.attacks
def test_what_a_proxy_swallows_is_missed_and_sent_again(request, tmp_path: Path) -> None:
    """It answers as MLflow does, so that only what the store has in the end shows it."""
    server = Server(tmp_path)
    request.addfinalizer(server.stop)
    server.start()
    Swallowing.behind = server.uri
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Swallowing)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    request.addfinalizer(proxy.shutdown)
    notes: list[str] = []
    config = TrackingConfig(uri=f"http://127.0.0.1:{proxy.server_port}")
    logger = RunLogger(config, run_name="x", note=notes.append, journal=tmp_path / "run/tracking")
    logger.log_config("a: 1", {"a": 1})
    logger.log_inputs([InputData("rows", "training", "abc", 3, "{}")])
    log_steps(logger, range(50))
    logger.set_tags({"who": "me"})
    logger.describe_score("held-out avg@8 1 %")
    logger.finalize()
    Swallowing.swallows = True
    for step in range(50, 100):
        logger.log_metrics({"actor/entropy": step / 7, "critic/value_loss": 1.0}, step=step)
    logger.set_tags({"later": "me"})
    logger.finalize()
    Swallowing.swallows = False
    for step in range(100, 150):
        logger.log_metrics({"actor/entropy": step / 7, "critic/value_loss": 1.0}, step=step)
    assert logger.close() == 0
    assert [note for note in notes if "does not have" in note] == [
        "tracking: the store does not have 51 records that it said it took"
    ], notes
    assert logger.run_id is not None
    client = MlflowClient(server.uri)
    for key in ("actor/entropy", "critic/value_loss"):
        steps = [row.step for row in client.get_metric_history(logger.run_id, key)]
        assert sorted(steps) == list(range(150))
    run = client.get_run(logger.run_id)
    assert (run.data.tags["later"], run.info.status) == ("me", "FINISHED")
