"""Handle each request of a rollout server in its own thread; answers are lines of JSON."""

from __future__ import annotations

import contextlib
import io
import json
import queue
import select
import socket
import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from vapo.errors import UserError
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Engine, Generated, Request
from vapo.rollouts.engines.server_requests import (
    GenerateBody,
    Limits,
    LoadBody,
    RefusalError,
    TimedReader,
    check_lengths,
    check_sender,
    content_length,
    parse,
)

# Responses of a client's requests by their places, an empty list as a heartbeat, or the error.
Answers = queue.SimpleQueue[list[tuple[int, Generated]] | Exception]


class ServedEngine(ThreadingTCPServer):
    """What a handler needs from its server, which all handlers share."""

    engine: Engine
    limits: Limits
    token: str | None
    host_names: frozenset[str]
    pushed: tuple[str, dict[str, Tensor]]
    jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` in the engine's thread, after what was submitted before."""
        future: Future[Any] = Future()
        self.jobs.put((future, work))
        return future

    @abstractmethod
    def begin(
        self,
        answers: Answers,
        requests: Sequence[Request],
        settings: SamplingSettings,
        end_ids: frozenset[int],
    ) -> list[str]:
        """Begin requests, whose responses go into `answers`. In the engine's thread.

        Returns: their names.
        """

    @abstractmethod
    def drop(self, names: Sequence[str]) -> None:
        """Drop those of the requests that are under way. In the engine's thread."""


_HEARTBEAT_S = 1.0
_LINGER_S = 2.0  # in which a refused client may finish sending, so that it reads the refusal
_JSON, _BINARY = "application/json", "application/octet-stream"
_PUSH_HEADER = "Vapo-Push"
# Path -> method, content type of the body, method of the handler.
_ROUTES = {
    "/info": ("GET", None, "_info"),
    "/generate": ("POST", _JSON, "_generate"),
    "/weights": ("POST", _BINARY, "_receive"),
    "/load": ("POST", _JSON, "_load"),
}


class RequestHandler(BaseHTTPRequestHandler):
    """One connection, which has one request."""

    server: ServedEngine

    def setup(self) -> None:
        super().setup()
        self.has_begun = False
        self.reader = TimedReader(self.connection, self.server.limits)
        self.rfile = io.BufferedReader(self.reader, 1 << 16)

    def handle(self) -> None:
        # The client has disconnected, or was too slow and has got the error already.
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line for every request would not help."""

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
        self.reader.allow(self.server.limits.seconds_for(length))
        try:
            body = self.rfile.read(length)
        except TimeoutError:
            raise RefusalError(408, f"the body of {length} bytes was sent too slowly") from None
        if len(body) < length:
            raise RefusalError(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send one line of error; discard what the client still sends, so that it arrives."""
        text = " ".join((message or self.responses[code][0]).split())
        self._line({"error": text}, code)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.reader.allow(_LINGER_S)
            while self.rfile.read(1 << 16):
                pass

    def _line(self, record: dict[str, Any], status: int = 200) -> None:
        """Send a line of the answer; the first one is sent with the status and headers."""
        if not self.has_begun:
            self.has_begun = True
            self.request_version = self.protocol_version  # also to a line that is no HTTP at all
            self.send_response_only(status)
            self.send_header("Content-Type", "application/x-ndjson")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
        line = json.dumps(record).encode() + b"\n"
        self.connection.settimeout(self.server.limits.seconds_for(len(line)))
        self.wfile.write(line)

    def _info(self) -> None:
        engine = self.server.engine
        self._line({"max_tokens": engine.max_tokens, "has_weights": engine.has_weights})

    def _generate(self) -> None:
        """The answer begins with the engine's first step, so that refusals have a status."""
        engine = self.server.engine
        wanted = parse(GenerateBody, self._body(self.server.limits.json_bytes))
        check_lengths(wanted, engine.max_tokens)
        answers: Answers = queue.SimpleQueue()

        def begin() -> list[str]:
            if not engine.has_weights:
                raise RefusalError(409, "the rollout server has no weights yet")
            return self.server.begin(
                answers,
                [Request(*request) for request in wanted.requests],
                SamplingSettings(**wanted.settings.model_dump()),
                frozenset(wanted.end_ids),
            )

        names = self.server.submit(begin).result()
        try:
            self._write_responses(answers, len(names))
        except BaseException:
            self.server.submit(lambda: self.server.drop(names))
            raise
        self._line({"generated": len(names)})

    def _write_responses(self, answers: Answers, num_left: int) -> None:
        """Write each response as it is finished, and heartbeats while the engine samples.

        Raises: OSError when the client has left; the engine's error.
        """
        while num_left:
            try:
                finished = answers.get(timeout=_HEARTBEAT_S)
            except queue.Empty:
                readable, _, _ = select.select([self.connection], [], [], 0)
                if readable and self.connection.recv(1, socket.MSG_PEEK) == b"":
                    raise ConnectionAbortedError from None
                continue
            if isinstance(finished, Exception):
                raise finished
            num_left -= len(finished)
            self._line({"responses": [[place, g.ids, g.logprobs] for place, g in finished]})

    def _receive(self) -> None:
        """Receive tensors of a push; its first part discards what another push has left."""
        server, push = self.server, self._push()
        body = self._body(server.limits.weights_bytes)
        try:
            tensors = safetensors.torch.load(body)
        except (SafetensorError, ValueError, KeyError) as error:
            raise RefusalError(
                400, f"the weights are not a complete safetensors file: {error}"
            ) from None

        def keep() -> int:
            before = server.pushed[1] if server.pushed[0] == push else {}
            together = before | tensors
            if sum(tensor.nbytes for tensor in together.values()) > server.limits.weights_bytes:
                server.pushed = ("", {})
                raise RefusalError(413, "the push has more bytes than the engine's model")
            server.pushed = (push, together)
            return len(together)

        self._line({"received": server.submit(keep).result()})

    def _load(self) -> None:
        server, push = self.server, self._push()
        expected = parse(LoadBody, self._body(server.limits.json_bytes)).num_tensors

        def load() -> None:
            (name, weights), server.pushed = server.pushed, ("", {})
            if name != push or len(weights) != expected:
                arrived = len(weights) if name == push else 0
                raise RefusalError(409, f"{arrived} tensors of this push arrived, of {expected}")
            server.engine.load(weights.items())

        server.submit(load).result()
        self._line({"loaded": expected})

    def _push(self) -> str:
        """The id of the push to which this request belongs: tensors of two are never mixed."""
        push: str | None = self.headers.get(_PUSH_HEADER)
        if not push:
            raise RefusalError(400, f"{self.path} needs the header {_PUSH_HEADER}")
        return push
