"""A tracking server whose answer has no end, or comes a byte at a time, costs little."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mlflow.exceptions import MlflowException

from vapo.tracking import answers, opening
from vapo.tracking.stores import locate_store

Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Starts a server that answers every request so; gives its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                try:
                    answer(self)
                except OSError:  # the client has gone
                    self.close_connection = True

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def headers(handler: BaseHTTPRequestHandler, **more: str) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    for name, value in more.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def whole(handler: BaseHTTPRequestHandler) -> None:
    text = b'{"experiment": {"experiment_id": "7", "name": "' + b"x" * 100_000 + b'"}}'
    headers(handler, Content_Length=str(len(text)))
    handler.wfile.write(text)


def endless(handler: BaseHTTPRequestHandler) -> None:
    headers(handler)
    while True:
        handler.wfile.write(b" " * 2**16)


def packed(handler: BaseHTTPRequestHandler) -> None:
    text = gzip.compress(b" " * 2**24)
    headers(handler, Content_Encoding="gzip", Content_Length=str(len(text)))
    handler.wfile.write(text)


def dripping(handler: BaseHTTPRequestHandler) -> None:
    headers(handler, Content_Length="1000000")
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


def dripping_header(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        handler.wfile.write(b"a")
        time.sleep(0.05)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 2**20)
    for name, value in opening._SETTINGS.items():
        monkeypatch.setenv(name, value)


def ask(uri: str) -> str:
    return str(locate_store(uri).client().get_experiment("7").name)


def test_an_answer_within_the_bounds_is_read(serve: Callable[[Answer], str], bounds: None) -> None:
    uri = serve(whole)
    assert [ask(uri) for _ in range(3)] == ["x" * 100_000] * 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (endless, "the answer is larger than 1 MiB"),
        (packed, "the answer is larger than 1 MiB"),
        pytest.param(dripping, r"no whole answer came within 0\.2 s", marks=pytest.mark.attacks),
        (dripping_header, r"no whole answer came within 0\.2 s"),
    ],
)
def test_an_answer_out_of_bounds_is_an_outage(
    serve: Callable[[Answer], str],
    bounds: None,
    answer: Answer,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "ANSWER_S", 0.2 if "0" in said else 60.0)
    uri, started = serve(answer), time.monotonic()
    for _ in range(2):
        with pytest.raises(MlflowException, match=said):
            ask(uri)
    assert time.monotonic() - started < 60
