"""An engine behind HTTP, for trainers on other devices or hosts: JSON and safetensors, no pickle.

    GET  /info      what the engine holds
    POST /generate  requests in; lines out: tokens heard, responses finished, at last all of them
    POST /weights   some tensors, as one safetensors file; they are kept until
    POST /load      puts them into the engine

One request at a time, in the order of arrival. Whoever can reach the port can use the engine:
listen on a trusted network only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import safetensors.torch
from torch import Tensor

from vapo.errors import UserError
from vapo.rollouts import SamplingSettings
from vapo.rollouts.vllm.colocated import ColocatedEngine
from vapo.rollouts.vllm.engine import Request

_HEARTBEAT_S = 1.0


class EngineServer(HTTPServer):
    """Serves one engine. The handlers run in the caller's thread, where vLLM lives."""

    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], engine: ColocatedEngine) -> None:
        super().__init__(address, _Handler)
        self.engine = engine
        self.received: dict[str, Tensor] = {}


class _Handler(BaseHTTPRequestHandler):
    server: EngineServer

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: one line a request says nothing."""

    def do_GET(self) -> None:
        if self.path != "/info":
            self.send_error(404)
            return
        engine = self.server.engine
        self._begin()
        self._line({"max_tokens": engine.max_tokens, "has_weights": engine.has_weights})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        actions: dict[str, Callable[[bytes], dict[str, Any]]] = {
            "/generate": self._generate,
            "/weights": self._receive,
            "/load": self._load,
        }
        action = actions.get(self.path)
        if action is None:
            self.send_error(404)
            return
        self._begin()
        try:
            result = action(body)
        except (UserError, ValueError, KeyError, TypeError) as error:
            result = {"error": str(error)}
        self._line(result)

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Connection", "close")
        self.end_headers()

    def _line(self, record: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(record).encode() + b"\n")
        self.wfile.flush()

    def _generate(self, body: bytes) -> dict[str, Any]:
        asked, engine = json.loads(body), self.server.engine
        if not engine.has_weights:
            raise UserError("the rollout server has no weights yet")
        last = time.monotonic()

        def heard() -> None:
            nonlocal last
            if time.monotonic() - last > _HEARTBEAT_S:
                last = time.monotonic()
                self._line({"finished": 0})

        generated = engine.generate(
            [Request(tuple(ids), seed) for ids, seed in asked["requests"]],
            SamplingSettings(**asked["settings"]),
            end_ids=frozenset(asked["end_ids"]),
            advance=lambda n: self._line({"finished": n}),
            heard=heard,
        )
        return {"generated": [[result.ids, result.logprobs] for result in generated]}

    def _receive(self, body: bytes) -> dict[str, Any]:
        self.server.received.update(safetensors.torch.load(body))
        return {"received": len(self.server.received)}

    def _load(self, body: bytes) -> dict[str, Any]:
        weights, self.server.received = self.server.received, {}
        expected = json.loads(body)["num_tensors"]
        if len(weights) != expected:
            raise UserError(f"{len(weights)} tensors arrived of {expected}")
        self.server.engine.load(weights.items())
        return {"loaded": expected}
