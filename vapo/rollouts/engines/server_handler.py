"""What a rollout server does with each request: a thread of its own, an answer of lines."""

from __future__ import annotations

import contextlib
import json
import queue
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from vapo.errors import UserError
from vapo.rollouts.engines.engine import Generated, HeardEngine
from vapo.rollouts.engines.server_requests import (
    Limits,
    RefusalError,
    TimedReader,
    check_sender,
    content_length,
    parse_generate,
    parse_load,
)


class ServedEngine(ThreadingHTTPServer):
    """What a handler needs of its server, which all handlers share."""

    engine: HeardEngine
    limits: Limits
    token: str | None
    host_names: frozenset[str]
    pushed: tuple[str, dict[str, Tensor]]

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have it done in the engine's thread, after what was submitted before."""
        raise NotImplementedError


_HEARTBEAT_S = 1.0
_JSON, _BINARY = "application/json", "application/octet-stream"
_PUSH_HEADER = "Vapo-Push"
# Path -> method, content type of the body, method of the handler.
_ROUTES = {
    "/info": ("GET", None, "_info"),
    "/generate": ("POST", _JSON, "_generate"),
    "/weights": ("POST", _BINARY, "_receive"),
    "/load": ("POST", _JSON, "_load"),
}


class ClientLeftError(Exception):
    """Nobody waits for the responses any more."""


class RequestHandler(BaseHTTPRequestHandler):
    """One connection, which has one request."""

    server: ServedEngine

    def setup(self) -> None:
        super().setup()
        self.reader = TimedReader(self.connection, self.server.limits)
        self.rfile = self.reader.buffered()

    def handle(self) -> None:
        # The client has left, or was too slow: there is nobody to tell, or it has been told.
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: one line a request says nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        try:
            self._route()
        except RefusalError as refusal:
            self.send_error(refusal.status, str(refusal))
        except UserError as error:  # the engine's
            self.send_error(500, str(error))
        except OSError:
            raise
        except Exception as error:
            traceback.print_exc()
            self.send_error(500, f"{type(error).__name__}: {error}")

    def _route(self) -> None:
        server = self.server
        check_sender(self.headers, server.host_names, server.token)
        if self.path not in _ROUTES:
            raise RefusalError(404, f"there is no {self.path[:100]}")
        method, content_type, action = _ROUTES[self.path]
        if self.command != method:
            raise RefusalError(405, f"{self.path} takes {method}")
        if content_type is not None and self.headers.get_content_type() != content_type:
            raise RefusalError(415, f"the body of {self.path} must be {content_type}")
        getattr(self, action)()

    def _body(self, limit: int) -> bytes:
        length = content_length(self.headers, limit)
        self.reader.expect(length)
        try:
            body = self.rfile.read(length)
        except TimeoutError:
            raise RefusalError(408, f"the body of {length} bytes was sent too slowly") from None
        if len(body) < length:
            raise RefusalError(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """As one line; what the client still sends is thrown away, so that it can read it."""
        text = " ".join((message or self.responses[code][0]).split())
        self._begin(code)
        self._line({"error": text})
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.reader.linger()
            while self.rfile.read(1 << 16):
                pass

    def _begin(self, status: int = 200) -> None:
        self.request_version = self.protocol_version  # also to a line that is no HTTP at all
        self.send_response_only(status)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def _line(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        self.connection.settimeout(self.server.limits.seconds_for(len(line)))
        self.wfile.write(line)

    def _client_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _info(self) -> None:
        engine = self.server.engine
        self._begin()
        self._line({"max_tokens": engine.max_tokens, "has_weights": engine.has_weights})

    def _generate(self) -> None:
        """The response begins with the engine's first token, so that refusals have a status."""
        limits, engine = self.server.limits, self.server.engine
        asked = parse_generate(self._body(limits.json_bytes), engine.max_tokens)
        told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        left, last = threading.Event(), time.monotonic()

        def finished(num: int) -> None:
            if left.is_set():
                raise ClientLeftError("the client has left")
            told.put(num)

        def heard() -> None:
            nonlocal last
            if left.is_set() or time.monotonic() - last > _HEARTBEAT_S:
                last = time.monotonic()
                finished(0)

        def work() -> list[Generated]:
            if not engine.has_weights:
                raise RefusalError(409, "the rollout server has no weights yet")
            return engine.generate(
                asked.requests,
                asked.settings,
                end_ids=asked.end_ids,
                advance=finished,
                heard=heard,
            )

        future = self.server.submit(work)
        future.add_done_callback(lambda _: told.put(None))
        try:
            has_begun = self._tell(told)
        except OSError:
            left.set()
            future.cancel()
            raise
        if (error := future.exception()) is not None and not has_begun:
            raise error
        if not has_begun:
            self._begin()
        if error is not None:
            self._line({"error": " ".join(str(error).split())})
            return
        self._line({"generated": [[result.ids, result.logprobs] for result in future.result()]})

    def _tell(self, told: queue.SimpleQueue[int | None]) -> bool:
        """Write how many have finished until all is done; whether a line was written.

        Raises: OSError when the client has left.
        """
        has_begun = False
        while True:
            try:
                num = told.get(timeout=_HEARTBEAT_S)
            except queue.Empty:
                if self._client_left():
                    raise ConnectionAbortedError from None
                continue
            if num is None:
                return has_begun
            if not has_begun:
                self._begin()
                has_begun = True
            self._line({"finished": num})

    def _receive(self) -> None:
        """Tensors of a push, whose first part throws away what another push has left."""
        server, push = self.server, self._push()
        body = self._body(server.limits.weights_bytes)
        try:
            tensors = safetensors.torch.load(body)
        except (SafetensorError, ValueError, KeyError) as error:
            raise RefusalError(400, f"the weights are no whole safetensors file: {error}") from None

        def keep() -> int:
            before = server.pushed[1] if server.pushed[0] == push else {}
            together = before | tensors
            if sum(tensor.nbytes for tensor in together.values()) > server.limits.weights_bytes:
                server.pushed = ("", {})
                raise RefusalError(413, "the push has more bytes than the engine's model")
            server.pushed = (push, together)
            return len(together)

        received = server.submit(keep).result()
        self._begin()
        self._line({"received": received})

    def _load(self) -> None:
        server, push = self.server, self._push()
        expected = parse_load(self._body(server.limits.json_bytes))

        def load() -> None:
            (name, weights), server.pushed = server.pushed, ("", {})
            if name != push or len(weights) != expected:
                arrived = len(weights) if name == push else 0
                raise RefusalError(409, f"{arrived} tensors of this push arrived, of {expected}")
            server.engine.load(weights.items())

        server.submit(load).result()
        self._begin()
        self._line({"loaded": expected})

    def _push(self) -> str:
        """Which push of weights this is a part of: tensors of two are never mixed."""
        push: str | None = self.headers.get(_PUSH_HEADER)
        if not push:
            raise RefusalError(400, f"{self.path} needs the header {_PUSH_HEADER}")
        return push
