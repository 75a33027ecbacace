"""A rollout server and bad requests: nobody holds up the others, and every error is reported."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.rollouts.serving import (
    BINARY,
    GENERATE,
    JSON,
    LIMITS,
    SETTINGS,
    WAIT_S,
    FakeEngine,
    ask,
    assert_served,
    connect,
    head,
    said,
    serving,
    status_of,
)
from vapo.rollouts.engines.server import EngineServer

# ---- nobody holds up the others -------------------------------------------------------------


@pytest.mark.parametrize("sent", ["", "POST /load HT", "half a body", "a negative length"])
def test_others_are_served_beside_a_client_that_stalls(server: EngineServer, sent: str) -> None:
    lengths = {"half a body": 100, "a negative length": -1}
    start = head(server, Content_Length=lengths[sent]) if sent in lengths else sent.encode()
    with connect(server, start + (b"{" if sent in lengths else b"")):
        assert_served(server)


def test_requests_of_several_connections_are_sampled_together_in_one_thread(
    server: EngineServer, engine: FakeEngine
) -> None:
    engine.resume.clear()
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(server, "POST", "/generate", GENERATE)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WAIT_S
    while engine.together < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert_served(server)
    engine.resume.set()
    for thread in threads:
        thread.join(WAIT_S)
    last = [{"responses": [[0, [7], [-0.5]]]}, {"generated": 1}]
    assert [(status, lines[-2:]) for status, lines in answers] == 4 * [(200, last)]
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


def test_for_a_client_that_has_left_nothing_is_sampled(
    server: EngineServer, engine: FakeEngine
) -> None:
    """A trainer that was killed, whose next session must not wait for the last one's."""
    engine.resume.clear()
    body = json.dumps(GENERATE).encode()
    sent = head(server, Content_Length=len(body)).replace(b"/load", b"/generate") + body
    first, second = connect(server, sent), connect(server, sent)
    deadline = time.monotonic() + WAIT_S
    while engine.together < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.close()
    while not engine.dropped:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    engine.resume.set()
    assert b'"generated": 1' in said(second)
    assert len(engine.dropped) == 1
    assert_served(server)


def test_weights_are_taken_while_requests_are_under_way(
    server: EngineServer, engine: FakeEngine
) -> None:
    engine.resume.clear()
    body = json.dumps(GENERATE).encode()
    sent = head(server, Content_Length=len(body)).replace(b"/load", b"/generate") + body
    client = connect(server, sent)
    assert engine.entered.wait(WAIT_S)
    assert ask(server, "POST", "/weights", WEIGHTS, BINARY)[0] == 200
    headers = {**JSON, "Vapo-Push": "1"}
    assert ask(server, "POST", "/load", {"num_tensors": 1}, headers)[0] == 200
    assert engine.weights
    engine.resume.set()
    assert b'"generated": 1' in said(client)


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
    "an empty prompt": (
        "POST",
        "/generate",
        {**GENERATE, "requests": [[[], 1, None, None]]},
        JSON,
        400,
    ),
    "a long prompt": (
        "POST",
        "/generate",
        {**GENERATE, "requests": [[[2] * 61, 1, None, None]]},
        JSON,
        400,
    ),
    "a float": ("POST", "/generate", {**GENERATE, "requests": [[[2.5], 1, None, None]]}, JSON, 400),
    "a negative seed": (
        "POST",
        "/generate",
        {**GENERATE, "requests": [[[2], -1, None, None]]},
        JSON,
        400,
    ),
    "no seed": ("POST", "/generate", {**GENERATE, "requests": [[[2]]]}, JSON, 400),
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
    two = {**GENERATE, "requests": [[[2], 1, None, None], [[3], 2, None, None]]}
    first = {"responses": [[0, [1], [-0.5]]]}
    assert ask(server, "POST", "/generate", two) == (200, [first, error])
    engine.fails_at = None
    second = {"responses": [[1, [2], [-0.5]]]}
    assert ask(server, "POST", "/generate", two) == (200, [first, second, {"generated": 2}])


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
