"""An engine behind HTTP, for trainers on other devices or hosts: JSON and safetensors, no pickle.

    GET  /info      what the engine holds
    POST /generate  requests in; lines out: heartbeats, responses finished, at last all of them
    POST /weights   some tensors of a push, as one safetensors file; they are kept until
    POST /load      puts them into the engine

Each connection is served in a thread of its own; the engine handles their requests one at a time,
in the order of arrival, in the serving thread. `server_requests.py` checks who may send requests,
how long a request may take and how large it may be. Every error has a status code and one line,
`{"error": ...}`; one that comes after the first line of a response is its last line.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import traceback
from collections.abc import Collection
from typing import Any

from torch import Tensor

from vapo.rollouts.engines.engine import HeartbeatEngine
from vapo.rollouts.engines.server_handler import RequestHandler, ServedEngine
from vapo.rollouts.engines.server_requests import Limits


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
        engine: HeartbeatEngine,
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
            while (job := self.jobs.get()) is not None:
                future, work = job
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(work())
                    except Exception as error:
                        future.set_exception(error)
        finally:
            super().shutdown()

    def shutdown(self) -> None:
        """End `serve_forever` once the engine has finished earlier requests."""
        self.jobs.put(None)

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
