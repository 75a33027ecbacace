"""An engine behind HTTP, for trainers on other devices or hosts: JSON and safetensors, no pickle.

    GET  /info      what the engine holds
    POST /generate  requests in; lines out: heartbeats, and each response once it is finished
    POST /weights   some tensors of a push, as one safetensors file; they are kept until
    POST /load      puts them into the engine

Each connection is served in a thread of its own. The engine samples the requests of all of them
together, step by step in the serving thread; what else concerns it, as taking weights, is done
there between two steps. `server_requests.py` checks who may send requests,
how long a request may take and how large it may be. Every error has a status code and one line,
`{"error": ...}`; one that comes after the first line of a response is its last line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Engine, EngineError, Request
from vapo.rollouts.engines.server_handler import Answers, RequestHandler, ServedEngine
from vapo.rollouts.engines.server_requests import Limits

_HEARTBEAT_S = 1.0


class EngineServer(ServedEngine):
    """Serves one engine. `serve_forever` runs it in the caller's thread, where vLLM lives.

    Args:
        token: what every request must carry; None: nothing.
        host_names: names of this host that requests may use, besides addresses and `localhost`.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        engine: Engine,
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
        self.jobs = queue.SimpleQueue()
        self._asked: dict[str, tuple[Answers, int]] = {}  # who waits for a request, as which
        self._numbers = itertools.count()
        self._last_heartbeat = 0.0
        self._slots = threading.BoundedSemaphore(limits.connections)
        super().__init__(address, RequestHandler)
        self.port: int = self.server_address[1]

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Until `shutdown`, or an interrupt of this thread."""
        accepting = threading.Thread(
            target=super().serve_forever, args=(poll_interval,), name="rollout-server", daemon=True
        )
        accepting.start()
        try:
            while self._do_jobs():
                if self._asked:
                    self._step()
        finally:
            super().shutdown()

    def shutdown(self) -> None:
        """End `serve_forever`; requests that are under way get an error."""
        self.jobs.put(None)

    def begin(
        self,
        answers: Answers,
        requests: Sequence[Request],
        settings: SamplingSettings,
        end_ids: frozenset[int],
    ) -> list[str]:
        """See `ServedEngine.begin`."""
        named = {f"request {next(self._numbers)}": request for request in requests}
        self.engine.submit(named, settings, end_ids=end_ids)
        if not self._asked:
            self._last_heartbeat = time.monotonic()
        self._asked |= {name: (answers, place) for place, name in enumerate(named)}
        return list(named)

    def drop(self, names: Sequence[str]) -> None:
        """See `ServedEngine.drop`."""
        if left := [name for name in names if self._asked.pop(name, None) is not None]:
            self.engine.abort(left)

    def _do_jobs(self) -> bool:
        """Do what was submitted, and wait for more while nothing is sampled; False to end."""
        while True:
            try:
                job = self.jobs.get(block=not self._asked)
            except queue.Empty:
                return True
            if job is None:
                self._fail(EngineError("the rollout server is stopping"))
                return False
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

    def _step(self) -> None:
        """Let the engine sample on, and hand out what is finished; its error goes to everyone."""
        try:
            results = self.engine.results(self._asked.keys())
        except Exception as error:
            self._fail(error)
            return
        for name, generated in results.items():
            answers, place = self._asked.pop(name)
            answers.put([(place, generated)])
        if time.monotonic() - self._last_heartbeat > _HEARTBEAT_S:
            self._last_heartbeat = time.monotonic()
            for answers in {answers for answers, _ in self._asked.values()}:
                answers.put([])

    def _fail(self, error: Exception) -> None:
        asked, self._asked = self._asked, {}
        with contextlib.suppress(Exception):  # the first error is the one to report
            self.engine.abort(list(asked))
        for answers in {answers for answers, _ in asked.values()}:
            answers.put(error)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, if there are not too many already."""
        if not self._slots.acquire(blocking=False):
            with contextlib.suppress(OSError):  # the client has disconnected
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
        """Print a traceback for our own bugs only, not for a client that disconnected."""
        traceback.print_exc()
