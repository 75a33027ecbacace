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

from vapo.rollouts.engines.engine import EngineError, Generated, Request
from vapo.rollouts.engines.server import EngineServer
from vapo.rollouts.engines.server_requests import Limits
from vapo.rollouts.engines.stepped import SteppedEngine

LIMITS = Limits(weights_bytes=1 << 16, json_bytes=1 << 16)
TOKEN = "0123456789abcdef-secret"
WAIT_S = 20.0
JSON = {"Content-Type": "application/json"}
BINARY = {"Content-Type": "application/octet-stream", "Vapo-Push": "1"}
SETTINGS = {"max_response_tokens": 4, "temperature": 1, "top_p": 1, "top_k": 0, "greedy": False}
GENERATE = {"requests": [[[2, 3], 7, None, None]], "settings": SETTINGS, "end_ids": [1]}


class FakeEngine(SteppedEngine):
    """Records the threads of its calls; a response repeats its request's seed, one a step."""

    max_tokens = 64

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] | None = {}
        self.threads: set[threading.Thread] = set()
        self.entered = threading.Event()
        self.resume = threading.Event()
        self.resume.set()
        self.open: dict[str, Request] = {}
        self.together = 0
        self.dropped: list[str] = []
        self.fails_at: int | None = None

    @property
    def has_weights(self) -> bool:
        return self.weights is not None

    def _begin(self, requests: Any, settings: Any, end_ids: Any) -> None:
        self.threads.add(threading.current_thread())
        self.open.update(requests)
        self.num_done = 0

    def _step(self) -> dict[str, Generated]:
        self.threads.add(threading.current_thread())
        self.together = max(self.together, len(self.open))
        self.entered.set()
        if not self.resume.wait(0.02):
            return {}
        if self.num_done == self.fails_at:
            raise EngineError("out of memory;\nlower it")
        self.num_done += 1
        name = next(iter(self.open))
        return {name: Generated((self.open.pop(name).seed,), (-0.5,))}

    def _drop(self, names: Any) -> None:
        self.dropped += [name for name in names if self.open.pop(name, None)]

    def load(self, weights: Any) -> None:
        self.threads.add(threading.current_thread())
        self.weights = dict(weights)

    def sleep(self) -> None: ...

    def close(self) -> None: ...


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
