"""A rollout server over a double of the engine, and requests to it, good and bad."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from vapo.rollouts.engines.engine import EngineError, Generated
from vapo.rollouts.engines.server import EngineServer
from vapo.rollouts.engines.server_requests import Limits

LIMITS = Limits(weights_bytes=1 << 16, json_bytes=1 << 16)
TOKEN = "0123456789abcdef-secret"
WAIT_S = 20.0
JSON = {"Content-Type": "application/json"}
BINARY = {"Content-Type": "application/octet-stream", "Vapo-Push": "1"}
SETTINGS = {"max_response_tokens": 4, "temperature": 1, "top_p": 1, "top_k": 0, "greedy": False}
GENERATE = {"requests": [[[2, 3], 7, None]], "settings": SETTINGS, "end_ids": [1]}


class FakeEngine:
    """Records the threads of its calls; a response repeats its request's seed."""

    max_tokens = 64

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] | None = {}
        self.threads: set[threading.Thread] = set()
        self.busy = threading.Lock()
        self.entered = threading.Event()
        self.resume = threading.Event()
        self.resume.set()
        self.ended_by: list[str] = []
        self.fails_at: int | None = None

    @property
    def has_weights(self) -> bool:
        return self.weights is not None

    def generate(self, requests: Any, settings: Any, *, end_ids: Any, advance: Any, heartbeat: Any):
        self.threads.add(threading.current_thread())
        assert self.busy.acquire(blocking=False), "one call at a time"
        try:
            self.entered.set()
            while not self.resume.wait(0.02):
                heartbeat()
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
        engine.resume.set()
        server.shutdown()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        server.server_close()


def url(server: EngineServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def ask(
    server: EngineServer, method: str, path: str, body: Any = None, headers: Any = None
) -> tuple[int, list[Any]]:
    """Status code and lines of the answer."""
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    address = ("127.0.0.1", server.port)
    with closing(http.client.HTTPConnection(*address, timeout=WAIT_S)) as client:
        client.request(method, path, body, JSON if headers is None else headers)
        answer = client.getresponse()
        return answer.status, [json.loads(line) for line in answer.read().splitlines()]


def connect(server: EngineServer, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), WAIT_S)
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
    given = {"Host": f"127.0.0.1:{server.port}", **JSON, "Vapo-Push": "1"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST /load HTTP/1.1\r\n{lines}\r\n".encode()
