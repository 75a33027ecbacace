"""An engine behind HTTP, for trainers on other devices or hosts: JSON and safetensors, no pickle.

    GET  /info      what the engine holds
    POST /generate  requests in; lines out: tokens heard, responses finished, at last all of them
    POST /weights   some tensors of a push, as one safetensors file; they are kept until
    POST /load      puts them into the engine

Many connections are served, each in a thread of its own; what they ask of the engine is done one
at a time, in the order of arrival, in the thread that serves. Who may ask, how long a request may
take and how large it may be: `server_requests.py`. Every error has a status code and one line,
`{"error": ...}`; one that comes after the first line of a response is its last line.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from vapo.errors import UserError
from vapo.rollouts.vllm.engine import Generated, HeardEngine
from vapo.rollouts.vllm.server_requests import (
    Limits,
    RefusalError,
    TimedReader,
    check_sender,
    content_length,
    parse_generate,
    parse_load,
)

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


class _ClientLeftError(Exception):
    """Nobody waits for the responses any more."""


class EngineServer(ThreadingHTTPServer):
    """Serves one engine. `serve_forever` runs it in the caller's thread, where vLLM lives.

    Args:
        token: what every request must carry; None: nothing.
        host_names: names by which trainers may call this host, beside addresses and `localhost`.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        engine: HeardEngine,
        *,
        limits: Limits,
        token: str | None = None,
        host_names: Collection[str] = (),
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.engine = engine
        self.limits = limits
        self.token = token
        self.host_names = frozenset({"localhost", *map(str.lower, host_names)})
        self.pushed: tuple[str, dict[str, Tensor]] = ("", {})  # of which push; the engine's thread
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(limits.connections)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without `HTTPServer`'s look-up of the host's name, which may wait for a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Until `shutdown`, or an interrupt of this thread."""
        accepting = threading.Thread(
            target=super().serve_forever, args=(poll_interval,), name="rollout-server", daemon=True
        )
        accepting.start()
        try:
            while (job := self._jobs.get()) is not None:
                _run(*job)
        finally:
            super().shutdown()
            while not self._jobs.empty():
                if (job := self._jobs.get()) is not None and not job[0].cancelled():
                    job[0].set_exception(_stopping())

    def shutdown(self) -> None:
        """End `serve_forever` once the engine has done what was asked before."""
        self._jobs.put(None)

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have it done in the engine's thread, after what was submitted before."""
        future: Future[Any] = Future()
        self._jobs.put((future, work))
        return future

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if there are not too many already."""
        if not self._slots.acquire(blocking=False):
            with contextlib.suppress(OSError):  # the client has left: nobody to tell
                request.settimeout(1.0)
                line = json.dumps({"error": f"{self.limits.connections} connections are served"})
                request.sendall(f"HTTP/1.0 503 Service Unavailable\r\n\r\n{line}\n".encode())
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Only our own bugs have tracebacks; a client that left in the middle is none."""
        traceback.print_exc()


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except Exception as error:
        future.set_exception(error)
    except BaseException:
        future.set_exception(_stopping())
        raise
    else:
        future.set_result(result)


def _stopping() -> RefusalError:
    return RefusalError(503, "the rollout server is stopping")


class _Handler(BaseHTTPRequestHandler):
    server: EngineServer

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
                raise _ClientLeftError("the client has left")
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
