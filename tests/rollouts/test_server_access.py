"""Who may ask a rollout server: this machine, or whoever has the token; no web page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.config.fits import ROOT, fit_config
from tests.rollouts.serving import (
    BINARY,
    JSON,
    TOKEN,
    WAIT_S,
    FakeEngine,
    ask,
    connect,
    said,
    serving,
    status_of,
    url,
)
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.cli import main
from vapo.commands import rollout_server
from vapo.config.credentials import ROLLOUT_SERVER_TOKEN
from vapo.errors import UserError
from vapo.rollouts.engines.access_token import is_loopback
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import EngineError, Generated, Request, sampled
from vapo.rollouts.engines.remote import RemoteEngine
from vapo.rollouts.engines.selection import check_engine
from vapo.rollouts.engines.server import EngineServer

# ---- who is served --------------------------------------------------------------------------


def test_what_a_web_page_can_send_is_refused(server: EngineServer, engine: FakeEngine) -> None:
    body = safetensors.torch.save({"w": torch.ones(2)})
    page = {"Origin": "http://evil.example", "Content-Type": "text/plain", "Vapo-Push": "1"}
    for headers in (page, {**page, "Origin": "null"}, {**page, **BINARY}):
        assert ask(server, "POST", "/weights", body, headers)[0] == 403
    del page["Origin"]
    assert ask(server, "POST", "/weights", body, page)[0] == 415
    assert ask(server, "POST", "/load", {"num_tensors": 1}, {**JSON, "Vapo-Push": "1"})[0] == 409
    assert engine.weights == {}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8100", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8100", 200),
        ("gpu2:8100", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8100", 403),
        ("", 403),
        ("[", 403),
    ],
)
def test_the_name_that_the_server_is_called_by(engine: FakeEngine, host: str, status: int) -> None:
    with serving(engine, host_names=["gpu2"]) as server:
        assert ask(server, "GET", "/info", headers={"Host": host})[0] == status


def test_requests_with_no_host_or_two_are_refused(server: EngineServer) -> None:
    for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        assert status_of(said(connect(server, b"GET /info HTTP/1.0\r\n" + hosts + b"\r\n"))) == 400


def test_every_request_needs_the_token(engine: FakeEngine) -> None:
    with serving(engine, token=TOKEN) as server:
        for given in (None, "", "Bearer", f"Bearer {TOKEN[:-1]}", TOKEN, f"bearer {TOKEN}é"):
            headers: dict[str, Any] = {}
            if given is not None:
                headers["Authorization"] = given.encode("latin-1")
            for method, path in (("GET", "/info"), ("POST", "/generate"), ("POST", "/nowhere")):
                status, (line,) = ask(server, method, path, b"", {**JSON, **headers})
                assert status == 401
                assert ROLLOUT_SERVER_TOKEN in line["error"]
                assert TOKEN not in line["error"]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert ask(server, "GET", "/info", headers=headers)[0] == 200


def test_the_client_sends_the_token_of_its_environment(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(engine, token=TOKEN) as server:
        with pytest.raises(EngineError, match=ROLLOUT_SERVER_TOKEN):
            RemoteEngine([url(server)], timeout_s=WAIT_S)
        monkeypatch.setenv(ROLLOUT_SERVER_TOKEN, TOKEN)
        remote = RemoteEngine([url(server)], timeout_s=WAIT_S)
        remote.load([("w", torch.ones(2)), ("v", torch.zeros(1))])
        request = Request((2, 3), 5)
        (generated,) = sampled(remote, [request], SamplingSettings(4), end_ids=frozenset([1]))
    assert generated == Generated((5,), (-0.5,))
    assert engine.weights is not None
    assert {name: tensor.tolist() for name, tensor in engine.weights.items()} == {
        "w": [1.0, 1.0],
        "v": [0.0],
    }


def _start(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> int:
    """`vapo rollout-server` with a double of the engine and of what serves it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(rollout_server, "check_engine", lambda config: None)
    monkeypatch.setattr(rollout_server, "make_served_engine", lambda *_: FakeEngine())
    monkeypatch.setattr(EngineServer, "serve_forever", lambda self: None)
    policy = save_tiny_folder(folder / "policy")
    config = [f"actor.path={policy}", "critic.init=policy", "rollouts.engine=vllm"]
    command = ["rollout-server", "--config", "conf/vapo.yaml", "--port", "0", *options]
    return main([*command, "trainer.accelerator=cpu", *config])


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        *[("127.9.9.9", True), ("::1", True), ("localhost", True), ("::", False), ("", False)],
        *[("0.0.0.0", False), ("10.0.0.1", False), ("localhost.evil.example", False)],
    ],
)
def test_what_loopback_is(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_on_loopback_no_token_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv(ROLLOUT_SERVER_TOKEN, raising=False)
    assert _start(monkeypatch, tmp_path, "--host", host) == 0


@pytest.mark.parametrize("token", [None, "", "short", "spaces are not possible"])
def test_beyond_loopback_a_good_token_is_required(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str | None,
) -> None:
    monkeypatch.delenv(ROLLOUT_SERVER_TOKEN, raising=False)
    if token is not None:
        monkeypatch.setenv(ROLLOUT_SERVER_TOKEN, token)
    assert _start(monkeypatch, tmp_path, "--host", "0.0.0.0") == 2
    error = capsys.readouterr().err
    assert ROLLOUT_SERVER_TOKEN in error
    assert not token or token not in error
    monkeypatch.setenv(ROLLOUT_SERVER_TOKEN, TOKEN)
    assert _start(monkeypatch, tmp_path, "--host", "0.0.0.0") == 0
    assert TOKEN not in "".join(capsys.readouterr())


def test_a_trainers_bad_token_is_found_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROLLOUT_SERVER_TOKEN, "short")
    servers = ["rollouts.engine=servers", "rollouts.servers.urls=http://gpu2:8100"]
    with pytest.raises(UserError, match=ROLLOUT_SERVER_TOKEN):
        check_engine(fit_config(tmp_path, *servers))


def test_the_limit_has_room_for_all_that_a_trainer_pushes(tmp_path: Path) -> None:
    model = tiny_model()
    pushed = sum(tensor.nbytes for tensor in model.state_dict().values())
    most = rollout_server.max_push_bytes(str(save_tiny_folder(tmp_path, model)))
    assert pushed < most < pushed + (32 << 20)
