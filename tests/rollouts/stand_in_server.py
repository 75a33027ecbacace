"""A stand-in for `vllm serve`: its routes over a tiny model, with failures that tests ask for."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.tiny_model import tiny_model

Change = Callable[[dict[str, Any]], Any]
MAX_TOKENS = 128
_LOGITS: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
"""Of all servers: what the same weights say after the same ids."""


class StandInServer:
    """One server. Its thread serves from the start; `stop` and `start` are a crash and a restart.

    `change` is what a lying server makes of its answers; `before_token` is awaited before each
    token; `told` are the routes that the trainer has used, but for those of sampling.
    """

    def __init__(self, *, has_routes_for_weights: bool = True) -> None:
        self.has_routes_for_weights = has_routes_for_weights
        self.change: Change = lambda answer: answer
        self.num_tokens = 0
        self.num_requests = 0
        self.is_stuck = False
        self.seconds_per_token = 0.0
        self.health_s = 0.0
        self.has_open_update = False
        self.failure: str | None = None  # the message with which the next update fails
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve, with random weights that nobody has sent."""
        self.version, self.told = "default", list[str]()
        self.has_open_update = False
        self.model: PreTrainedModel = tiny_model()
        torch.nn.init.normal_(self.model.model.embed_tokens.weight)
        self._weights_digest = digest(self.model)
        self._do(self._start())

    def stop(self) -> None:
        """As after kill -9: every connection breaks."""
        self._do(self._stop())

    def close(self) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> None:
        self.running = asyncio.Event()
        self.running.set()
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/inference/v1/generate", self._generate),
            ]
        )
        if self.has_routes_for_weights:
            app.add_routes(
                [
                    web.get("/is_paused", self._is_paused),
                    web.get("/weight_info", self._weight_info),
                    web.get("/get_world_size", self._world_size),
                    *(
                        web.post(path, self._weights)
                        for path in (
                            "/pause",
                            "/resume",
                            "/init_weight_transfer_engine",
                            "/start_weight_update",
                            "/update_weights",
                            "/finish_weight_update",
                        )
                    ),
                ]
            )
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        self.is_stuck = False
        for connection in list(self._runner.server.connections if self._runner.server else []):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": MAX_TOKENS}]})

    async def _health(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.health_s)
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        while self.is_stuck:
            await asyncio.sleep(0.05)
        return web.Response(text=f"# HELP x\nvllm:generation_tokens_total {self.num_tokens}\n")

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.running.is_set()})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _weights(self, request: web.Request) -> web.Response:
        self.told.append(request.path)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/start_weight_update" and self.has_open_update:
            return web.json_response({"error": {"message": "already active"}}, status=500)
        if request.path == "/pause":
            assert request.query["mode"] == "keep"
            self.running.clear()
        elif request.path == "/resume":
            self.running.set()
        elif request.path == "/update_weights":
            assert "/init_weight_transfer_engine" in self.told
            if self.failure is not None:
                message, self.failure = self.failure, None
                return web.json_response({"error": {"message": message}}, status=500)
            folder = Path(body["update_info"]["folder"])
            state = dict[str, torch.Tensor]()
            for file in sorted(folder.glob("*.safetensors")):
                state |= load_file(file)
            self.model.load_state_dict(state)
            self._weights_digest = digest(self.model)
        elif request.path == "/finish_weight_update":
            self.version = body["weight_version"]
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_requests += 1
        params, ids = body["sampling_params"], list(body["token_ids"])
        draw = torch.Generator().manual_seed((params["seed"] or 0) % (1 << 62))
        found, versions = list[tuple[int, float]](), list[dict[str, Any]]()
        while len(found) < params["max_tokens"]:
            await asyncio.sleep(self.seconds_per_token)
            await self.running.wait()
            while self.is_stuck:
                await asyncio.sleep(0.05)
            token, logprob = self._next(ids, params, draw)
            if not versions or versions[-1]["version"] != self.version:
                versions.append({"version": self.version, "start": len(found), "end": 0})
            ids.append(token)
            found.append((token, logprob))
            versions[-1]["end"] = len(found)
            self.num_tokens += 1
            if token in params["stop_token_ids"]:
                break
        answer = {
            "request_id": f"generate-tokens-{body['request_id']}",
            "choices": [
                {
                    "token_ids": [token for token, _ in found],
                    "finish_reason": "stop"
                    if found[-1][0] in params["stop_token_ids"]
                    else "length",
                    "weight_versions": versions,
                    "logprobs": {"content": [{"token_id": t, "logprob": x} for t, x in found]},
                }
            ],
        }
        return web.json_response(self.change(answer))

    @torch.no_grad()
    def _next(
        self, ids: list[int], params: dict[str, Any], draw: torch.Generator
    ) -> tuple[int, float]:
        state = (self._weights_digest, tuple(ids))
        if state not in _LOGITS:
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            _LOGITS[state] = logits.clone()
        logprobs = torch.log_softmax(_LOGITS[state] / (params["temperature"] or 1.0), dim=0)
        if params["temperature"] == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=draw))
        return token, float(logprobs[token])


def digest(model: PreTrainedModel) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def stand_ins(num: int = 1, **options: Any) -> Iterator[list[StandInServer]]:
    servers = [StandInServer(**options) for _ in range(num)]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()
