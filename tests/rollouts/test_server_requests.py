"""A rollout server among strangers: who is served, and that nobody can hold up the others."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.config.fits import ROOT
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.cli import main
from vapo.commands import rollout_server
from vapo.config.engines import VllmConfig
from vapo.errors import UserError
from vapo.rollouts import SamplingSettings
from vapo.rollouts.vllm.access_token import is_loopback
from vapo.rollouts.vllm.colocated import ColocatedEngine
from vapo.rollouts.vllm.engine import EngineError, Generated, Request
from vapo.rollouts.vllm.engine_args import EngineSize, check_engine_args, engine_arguments
from vapo.rollouts.vllm.remote import RemoteEngine
from vapo.rollouts.vllm.server import EngineServer
from vapo.rollouts.vllm.server_requests import Limits

LIMITS = Limits(weights_bytes=1 << 16, json_bytes=1 << 16)
TOKEN = "0123456789abcdef-secret"
TOKEN_VARIABLE = "VAPO_ROLLOUT_SERVER_TOKEN"
WAIT_S = 20.0
JSON = {"Content-Type": "application/json"}
BINARY = {"Content-Type": "application/octet-stream", "Vapo-Push": "1"}
SETTINGS = {"max_response_tokens": 4, "temperature": 1, "top_p": 1, "top_k": 0, "greedy": False}
GENERATE = {"requests": [[[2, 3], 7]], "settings": SETTINGS, "end_ids": [1]}


class FakeEngine:
    """Notes the threads of its calls; a response repeats its request's seed."""

    max_tokens = 64

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] | None = {}
        self.threads: set[threading.Thread] = set()
        self.busy = threading.Lock()
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.ended_by: list[str] = []
        self.fails_at: int | None = None

    @property
    def has_weights(self) -> bool:
        return self.weights is not None

    def generate(self, requests: Any, settings: Any, *, end_ids: Any, advance: Any, heard: Any):
        self.threads.add(threading.current_thread())
        assert self.busy.acquire(blocking=False), "one call at a time"
        try:
            self.entered.set()
            while not self.go_on.wait(0.02):
                heard()
            for index, _ in enumerate(requests):
                if index == self.fails_at:
                    raise EngineError("out of memory;\nlower it")
                advance(1)
            return [Generated((request.seed,), (-0.5,)) for request in requests]
        except BaseException as error:
            self.ended_by.append(type(error).__name__)
            raise
        finally:
            self.busy.release()

    def load(self, weights: Any) -> None:
        self.threads.add(threading.current_thread())
        self.weights = dict(weights)


@contextmanager
def serving(engine: Any, **options: Any) -> Iterator[EngineServer]:
    server = EngineServer(("127.0.0.1", 0), engine, **{"limits": LIMITS, **options})
    thread = threading.Thread(target=server.serve_forever, name="engine's", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        engine.go_on.set()
        server.shutdown()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        server.server_close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[EngineServer]:
    with serving(engine) as server:
        yield server


def url(server: EngineServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def ask(
    server: EngineServer, method: str, path: str, body: Any = None, headers: Any = None
) -> tuple[int, list[Any]]:
    """Status code and lines of the answer."""
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    address = ("127.0.0.1", server.server_port)
    with closing(http.client.HTTPConnection(*address, timeout=WAIT_S)) as client:
        client.request(method, path, body, JSON if headers is None else headers)
        answer = client.getresponse()
        return answer.status, [json.loads(line) for line in answer.read().splitlines()]


def connect(server: EngineServer, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.server_port), WAIT_S)
    client.sendall(sent)
    return client


def said(client: socket.socket) -> bytes:
    """All that the server sends until it closes."""
    with client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def assert_served(server: EngineServer) -> None:
    status, (line,) = ask(server, "GET", "/info")
    assert (status, line["max_tokens"]) == (200, 64)


def head(server: EngineServer, **headers: Any) -> bytes:
    given = {"Host": f"127.0.0.1:{server.server_port}", **JSON, "Vapo-Push": "1"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST /load HTTP/1.1\r\n{lines}\r\n".encode()


# ---- nobody holds up the others -------------------------------------------------------------


@pytest.mark.parametrize("sent", ["", "POST /load HT", "half a body", "a negative length"])
def test_others_are_served_beside_a_client_that_does_not_go_on(
    server: EngineServer, sent: str
) -> None:
    lengths = {"half a body": 100, "a negative length": -1}
    start = head(server, Content_Length=lengths[sent]) if sent in lengths else sent.encode()
    with connect(server, start + (b"{" if sent in lengths else b"")):
        assert_served(server)


def test_others_are_served_while_the_engine_works_and_its_calls_come_one_by_one(
    server: EngineServer, engine: FakeEngine
) -> None:
    engine.go_on.clear()
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(server, "POST", "/generate", GENERATE)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert engine.entered.wait(WAIT_S)
    assert_served(server)
    engine.go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert [(status, lines[-1]) for status, lines in answers] == 4 * [
        (200, {"generated": [[[7], [-0.5]]]})
    ]
    assert {thread.name for thread in engine.threads} == {"engine's"}


@pytest.mark.parametrize("part", ["", "POST /load HTTP/1.1\r\nHo", "body", "trickle"])
def test_a_slow_client_is_cut_off(engine: FakeEngine, part: str) -> None:
    limits = replace(LIMITS, headers_s=0.3, idle_s=0.3, bytes_per_s=1e6)
    started = time.monotonic()
    with serving(engine, limits=limits) as server:
        has_body = part in ("body", "trickle")
        client = connect(server, head(server, Content_Length=100) if has_body else part.encode())
        if part == "trickle":  # never idle, and never done
            with suppress(ConnectionError):
                while time.monotonic() - started < WAIT_S:
                    client.sendall(b" ")
                    time.sleep(0.05)
        answer = said(client) if part != "trickle" else b""
    assert time.monotonic() - started < WAIT_S / 2
    if part == "body":
        assert status_of(answer) == 408
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"].endswith("too slowly")


def test_more_connections_than_are_served_are_refused(engine: FakeEngine) -> None:
    with serving(engine, limits=replace(LIMITS, connections=2)) as server:
        held = [connect(server) for _ in range(2)]
        assert ask(server, "GET", "/info") == (503, [{"error": "2 connections are served"}])
        held[0].close()
        deadline = time.monotonic() + WAIT_S
        while ask(server, "GET", "/info")[0] == 503:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        held[1].close()


@pytest.mark.parametrize("when", ["while it is sampled for", "while it waits"])
def test_for_a_client_that_has_left_nothing_is_sampled(
    server: EngineServer, engine: FakeEngine, when: str
) -> None:
    """A trainer that was killed, whose next session must not wait for the last one's."""
    engine.go_on.clear()
    body = json.dumps(GENERATE).encode()
    sent = head(server, Content_Length=len(body)).replace(b"/load", b"/generate") + body
    first = connect(server, sent)
    assert engine.entered.wait(WAIT_S)
    if when == "while it waits":
        connect(server, sent).close()
        time.sleep(2.5)  # until it is noticed
        engine.go_on.set()
        assert status_of(said(first)) == 200
        assert_served(server)
        assert engine.ended_by == []
    else:
        first.close()
        deadline = time.monotonic() + WAIT_S
        while not engine.ended_by:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        engine.go_on.set()
    assert ask(server, "POST", "/generate", GENERATE)[0] == 200


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


def test_the_token_is_asked_of_every_request(engine: FakeEngine) -> None:
    with serving(engine, token=TOKEN) as server:
        for given in (None, "", "Bearer", f"Bearer {TOKEN[:-1]}", TOKEN, f"bearer {TOKEN}é"):
            headers = {} if given is None else {"Authorization": given.encode()}
            for method, path in (("GET", "/info"), ("POST", "/generate"), ("POST", "/nowhere")):
                status, (line,) = ask(server, method, path, b"", {**JSON, **headers})
                assert status == 401
                assert TOKEN_VARIABLE in line["error"]
                assert TOKEN not in line["error"]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert ask(server, "GET", "/info", headers=headers)[0] == 200


def test_the_client_sends_the_token_of_its_environment(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(engine, token=TOKEN) as server:
        with pytest.raises(EngineError, match=TOKEN_VARIABLE):
            RemoteEngine([url(server)], timeout_s=WAIT_S)
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        remote = RemoteEngine([url(server)], timeout_s=WAIT_S)
        remote.load([("w", torch.ones(2)), ("v", torch.zeros(1))])
        request = Request((2, 3), 5)
        (generated,) = remote.generate([request], SamplingSettings(4), end_ids=frozenset([1]))
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
    made = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(rollout_server, "make_colocated_engine", lambda *_: made)
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
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert _start(monkeypatch, tmp_path, "--host", host) == 0


@pytest.mark.parametrize("token", [None, "", "short", "spaces are not possible"])
def test_beyond_loopback_a_good_token_is_required(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str | None,
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    if token is not None:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    assert _start(monkeypatch, tmp_path, "--host", "0.0.0.0") == 2
    error = capsys.readouterr().err
    assert TOKEN_VARIABLE in error
    assert not token or token not in error
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert _start(monkeypatch, tmp_path, "--host", "0.0.0.0") == 0
    assert TOKEN not in "".join(capsys.readouterr())


# ---- every error has a status and one line --------------------------------------------------

WEIGHTS = safetensors.torch.save({"w": torch.arange(64.0)})


LOAD = {**JSON, "Vapo-Push": "1"}
MISTAKES: dict[str, tuple[str, str, Any, Any, int]] = {
    "a truncated file": ("POST", "/weights", WEIGHTS[:-1], BINARY, 400),
    "no safetensors": ("POST", "/weights", b"\xff" * 64, BINARY, 400),
    "an empty file": ("POST", "/weights", b"", BINARY, 400),
    "weights of no push": ("POST", "/weights", WEIGHTS, {**BINARY, "Vapo-Push": ""}, 400),
    "too many weights": ("POST", "/weights", b"0" * (1 << 16) + b"0", BINARY, 413),
    "too long a length": ("POST", "/weights", b"", {**BINARY, "Content-Length": "9" * 5000}, 413),
    "a negative length": ("POST", "/weights", b"", {**BINARY, "Content-Length": "-1"}, 400),
    "a length with a sign": ("POST", "/weights", b"", {**BINARY, "Content-Length": "+9"}, 400),
    "a body in chunks": ("POST", "/weights", iter([WEIGHTS]), BINARY, 411),
    "missing tensors": ("POST", "/load", {"num_tensors": 1}, LOAD, 409),
    "a number in quotes": ("POST", "/load", {"num_tensors": "1"}, LOAD, 400),
    "a load of no push": ("POST", "/load", {"num_tensors": 1}, JSON, 400),
    "half an object": ("POST", "/generate", b"{", JSON, 400),
    "deep nesting": ("POST", "/generate", b"[" * 60000, JSON, 400),
    "no UTF-8": ("POST", "/generate", b"\xff", JSON, 400),
    "a list": ("POST", "/generate", b"[]", JSON, 400),
    "no keys": ("POST", "/generate", {}, JSON, 400),
    "an empty prompt": ("POST", "/generate", {**GENERATE, "requests": [[[], 1]]}, JSON, 400),
    "a long prompt": ("POST", "/generate", {**GENERATE, "requests": [[[2] * 61, 1]]}, JSON, 400),
    "a float": ("POST", "/generate", {**GENERATE, "requests": [[[2.5], 1]]}, JSON, 400),
    "a negative seed": ("POST", "/generate", {**GENERATE, "requests": [[[2], -1]]}, JSON, 400),
    "no seed": ("POST", "/generate", {**GENERATE, "requests": [[2]]}, JSON, 400),
    "end ids as object": ("POST", "/generate", {**GENERATE, "end_ids": {"1": 1}}, JSON, 400),
    "no settings": ("POST", "/generate", {**GENERATE, "settings": {}}, JSON, 400),
    "top_p": ("POST", "/generate", {**GENERATE, "settings": {**SETTINGS, "top_p": 2}}, JSON, 400),
    "top_k": (
        "POST",
        "/generate",
        {**GENERATE, "settings": {**SETTINGS, "top_k": True}},
        JSON,
        400,
    ),
    "an unknown path": ("POST", "/nowhere", b"", JSON, 404),
    "no path": ("GET", "/", None, {}, 404),
    "GET for POST": ("GET", "/load", None, {}, 405),
    "POST for GET": ("POST", "/info", b"", JSON, 405),
    "another method": ("DELETE", "/info", None, {}, 501),
}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"), MISTAKES.values(), ids=MISTAKES
)
def test_every_mistake_has_a_status_and_one_line(
    server: EngineServer, method: str, path: str, body: Any, headers: Any, status: int
) -> None:
    found, (line,) = ask(server, method, path, body, headers)
    assert found == status
    assert list(line) == ["error"]
    assert 0 < len(line["error"]) < 500
    assert "\n" not in line["error"]
    assert_served(server)


def test_no_http_at_all(server: EngineServer) -> None:
    assert status_of(said(connect(server, b"\x16\x03\x01 hello you\r\n\r\n"))) == 400
    assert_served(server)


def test_the_engines_errors(server: EngineServer, engine: FakeEngine) -> None:
    engine.weights = None
    assert ask(server, "POST", "/generate", GENERATE) == (
        409,
        [{"error": "the rollout server has no weights yet"}],
    )
    engine.weights, engine.fails_at = {}, 0
    error = {"error": "out of memory; lower it"}
    assert ask(server, "POST", "/generate", GENERATE) == (500, [error])
    engine.fails_at = 1
    two = {**GENERATE, "requests": [[[2], 1], [[3], 2]]}
    assert ask(server, "POST", "/generate", two) == (200, [{"finished": 1}, error])
    engine.fails_at = None
    assert ask(server, "POST", "/generate", two)[1][-1] == {
        "generated": [[[1], [-0.5]], [[2], [-0.5]]]
    }


def test_an_engine_that_breaks_in_a_way_of_its_own(
    server: EngineServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(weights: Any) -> None:
        raise RuntimeError("shapes differ\nin w")

    monkeypatch.setattr(engine, "load", load)
    assert ask(server, "POST", "/weights", WEIGHTS, BINARY)[0] == 200
    headers = {**JSON, "Vapo-Push": "1"}
    status, (line,) = ask(server, "POST", "/load", {"num_tensors": 1}, headers)
    assert (status, line) == (500, {"error": "RuntimeError: shapes differ in w"})
    assert_served(server)


# ---- weights --------------------------------------------------------------------------------


def test_tensors_of_two_pushes_are_never_mixed(server: EngineServer, engine: FakeEngine) -> None:
    """A trainer is killed in the middle of a push; its next session pushes anew."""
    old = safetensors.torch.save({"a": torch.zeros(1), "b": torch.zeros(1)})
    new = [safetensors.torch.save({name: torch.ones(1)}) for name in "ac"]
    assert ask(server, "POST", "/weights", old, BINARY)[0] == 200
    second = {**BINARY, "Vapo-Push": "2"}
    assert [ask(server, "POST", "/weights", body, second)[1] for body in new] == [
        [{"received": 1}],
        [{"received": 2}],
    ]
    load = {"num_tensors": 2}
    assert ask(server, "POST", "/load", load, {**JSON, "Vapo-Push": "1"})[0] == 409
    for body in new:
        assert ask(server, "POST", "/weights", body, second)[0] == 200
    assert ask(server, "POST", "/load", load, {**JSON, "Vapo-Push": "2"})[0] == 200
    assert engine.weights is not None
    assert {name: tensor.item() for name, tensor in engine.weights.items()} == {"a": 1.0, "c": 1.0}


def test_a_push_has_no_more_bytes_than_the_model(server: EngineServer) -> None:
    for index in range(4):
        body = safetensors.torch.save({f"w{index}": torch.zeros(5000)})
        status, _ = ask(server, "POST", "/weights", body, BINARY)
        assert status == (200 if index < 3 else 413)


def test_the_limit_has_room_for_all_that_a_trainer_pushes(tmp_path: Path) -> None:
    model = tiny_model()
    pushed = sum(tensor.nbytes for tensor in model.state_dict().values())
    most = rollout_server.max_push_bytes(str(save_tiny_folder(tmp_path, model)))
    assert pushed < most < pushed + (32 << 20)


# ---- what a server and a trainer give vLLM --------------------------------------------------


def test_vllm_runs_no_code_of_the_model_folder() -> None:
    arguments = engine_arguments(
        VllmConfig(),
        EngineSize(64, 8),
        model_path="policy",
        dtype="float32",
        on_gpu=False,
        in_process_group=False,
    )
    assert arguments["trust_remote_code"] is False


@pytest.mark.parametrize("value", [True, False, None])
def test_nobody_can_ask_vllm_to_run_it(value: Any) -> None:
    engine_args = make_dataclass("EngineArgs", ["model", "trust_remote_code"])
    with pytest.raises(UserError, match="vapo runs no code out of model folders"):
        check_engine_args({"trust_remote_code": value}, engine_args)


# ---- what is left in vLLM when a call ends early --------------------------------------------


def test_a_call_that_ends_early_leaves_no_requests_in_the_engine() -> None:
    aborted: list[str] = []

    class Core:
        def get_output(self) -> Any: ...

    class Engine:
        engine_core = Core()

        def has_unfinished_requests(self) -> bool:
            return True

        def step(self) -> list[Any]:
            raise UserError("the client has left")

        def abort_request(self, names: list[str]) -> None:
            aborted.extend(names)

    colocated = ColocatedEngine.__new__(ColocatedEngine)
    names = iter("abc")
    fakes: Any = {
        "_engine": Engine(),
        "_timeout_s": WAIT_S,
        "_is_asleep": False,
        "_state": SimpleNamespace(entered=lambda: closing(SimpleNamespace(close=lambda: None))),
        "_submit": lambda *_: next(names),
    }
    colocated.__dict__.update(fakes)
    requests = [Request((2,), seed) for seed in range(2)]
    with pytest.raises(UserError, match="the client has left"):
        colocated.generate(requests, SamplingSettings(4), end_ids=frozenset())
    assert aborted == ["a", "b"]
