"""The trainer's side of `vapo rollout-server`: engines of other processes as one engine."""

from __future__ import annotations

import http.client
import json
import queue
import secrets
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import safetensors.torch
from torch import Tensor

from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import EngineError, Generated, Request
from vapo.rollouts.engines.remote_server import LostServerError, RolloutServer, hang_up
from vapo.rollouts.engines.stepped import SteppedEngine
from vapo.system.distributed import gather_objects, rank, world_size
from vapo.system.shown_text import say

_CHUNK_BYTES = 256 << 20
_BINARY = "application/octet-stream"
_CONNECTIONS = 48  # to one server, of all ranks; requests beyond wait for the next that ends
_WAIT_S = 0.05
_EPISODES = 1 << 16  # whose servers are remembered


@dataclass(eq=False)
class _Asked:
    """A request that is under way, and where."""

    request: Request
    settings: SamplingSettings
    end_ids: frozenset[int]
    server: RolloutServer
    batch: _Batch | None = None  # None: it waits for a connection


@dataclass(eq=False)
class _Batch:
    """Requests of one connection; its answer is read in a thread."""

    server: RolloutServer
    names: list[str]
    connection: http.client.HTTPConnection | None = None
    left: set[str] = field(default_factory=set)


class RemoteEngine(SteppedEngine):
    """See `Engine`. Each rank samples from its share of the servers; rank 0 feeds them all.

    Turns of an episode go to one server, which may keep their caches. A server that says nothing
    for `timeout_s`, or cannot be reached, is lost: its requests go to the others, and it gets no
    more. Several ranks on one server slow each other down: give every rank its own.
    """

    def __init__(self, urls: Sequence[str], *, timeout_s: float) -> None:
        super().__init__()
        places = range(len(urls))
        mine = places[rank() :: world_size()] or [rank() % len(urls)]
        # A server of other ranks, which this one uses once its own are lost, may get all ranks.
        num_ranks = [
            max(1, len(range(place, world_size(), len(urls)))) if place in mine else world_size()
            for place in places
        ]
        self._all = [
            RolloutServer(url, timeout_s=timeout_s, max_connections=max(1, _CONNECTIONS // num))
            for url, num in zip(urls, num_ranks, strict=True)
        ]
        self._mine = [self._all[place] for place in mine]
        self._under_way: dict[str, _Asked] = {}
        self._homes: dict[str, RolloutServer] = {}  # of episodes
        self._events: queue.SimpleQueue[tuple[_Batch, list[list[Any]] | EngineError | None]]
        self._events = queue.SimpleQueue()
        self.has_weights = False
        self.max_tokens = min(int(server.ask("/info")["max_tokens"]) for server in self._all)

    # ---- requests -----------------------------------------------------------------------------

    def _begin(
        self,
        requests: Mapping[str, Request],
        settings: SamplingSettings,
        end_ids: frozenset[int],
    ) -> None:
        homes = {name: self._home(request) for name, request in requests.items()}
        new = [name for name, home in homes.items() if home is None]
        servers = sorted(self._living(), key=lambda server: server.num_asked)
        # Neighbours, which may have one prompt, are on one server.
        size = -(-len(new) // len(servers))
        for place, name in enumerate(new):
            homes[name] = servers[place // size]
        for name, home in homes.items():
            assert home is not None
            self._assign(name, _Asked(requests[name], settings, end_ids, home))
        self._send()

    def _assign(self, name: str, asked: _Asked) -> None:
        asked.batch = None
        asked.server.num_asked += 1
        self._under_way[name] = asked
        if asked.request.episode is not None:
            self._homes[asked.request.episode] = asked.server
            if len(self._homes) > _EPISODES:
                del self._homes[next(iter(self._homes))]

    def _home(self, request: Request) -> RolloutServer | None:
        home = self._homes.get(request.episode) if request.episode is not None else None
        return None if home is None or home.is_lost else home

    def _living(self) -> list[RolloutServer]:
        living = [server for server in self._mine if not server.is_lost]
        return living or [server for server in self._all if not server.is_lost]

    def _send(self) -> None:
        """Send what waits: all requests of one server and one settings in one connection."""
        groups: dict[tuple[RolloutServer, SamplingSettings, frozenset[int]], list[str]] = {}
        for name, asked in self._under_way.items():
            if asked.batch is None:
                key = asked.server, asked.settings, asked.end_ids
                groups.setdefault(key, []).append(name)
        for (server, settings, end_ids), names in groups.items():
            if server.num_connections >= server.max_connections:
                continue
            batch = _Batch(server, names, left=set(names))
            wanted = [self._under_way[name] for name in names]
            for asked in wanted:
                asked.batch = batch
            requests = [asked.request for asked in wanted]
            body = {
                "requests": [[r.prompt_ids, r.seed, r.max_tokens, r.episode] for r in requests],
                "settings": asdict(settings),
                "end_ids": sorted(end_ids),
            }
            server.num_connections += 1
            threading.Thread(
                target=self._listen, args=(batch, json.dumps(body).encode()), daemon=True
            ).start()

    def _listen(self, batch: _Batch, body: bytes) -> None:
        """Read the answer to a batch, in a thread of its own."""

        def opened(connection: http.client.HTTPConnection) -> None:
            if not batch.left:  # dropped while the server was full
                raise EngineError("there is nothing left to ask for")
            batch.connection = connection

        try:
            for record in batch.server.lines("/generate", body, opened=opened):
                if "generated" in record:
                    break
                self._events.put((batch, record["responses"]))
        except EngineError as error:
            self._events.put((batch, error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._events.put((batch, EngineError(f"the answer of {batch.server.url}: {text}")))
        else:
            self._events.put((batch, None))

    def _step(self) -> dict[str, Generated]:
        found: dict[str, Generated] = {}
        timeout = _WAIT_S
        while not self._events.empty() or timeout:
            try:
                batch, event = self._events.get(timeout=timeout)
            except queue.Empty:
                break
            timeout = 0.0
            if isinstance(event, list):
                for place, ids, logprobs in event:
                    if self._finish(batch.names[place], batch):
                        found[batch.names[place]] = Generated(tuple(ids), tuple(logprobs))
            else:
                self._ended(batch, event)
        self._send()
        return found

    def _finish(self, name: str, batch: _Batch) -> bool:
        """Whether the request was under way in this batch: it no longer is."""
        if name not in batch.left:
            return False
        batch.left.discard(name)
        del self._under_way[name]
        batch.server.num_asked -= 1
        return True

    def _ended(self, batch: _Batch, error: EngineError | None) -> None:
        batch.server.num_connections -= 1
        if not batch.left:  # whatever became of the connection
            return
        if error is None:
            num = len(batch.names)
            error = EngineError(
                f"{batch.server.url} gave {num - len(batch.left)} of {num} responses"
            )
        if not isinstance(error, LostServerError):
            raise error
        self._lose(batch.server, error)

    def _lose(self, server: RolloutServer, error: LostServerError) -> None:
        """Give the requests of a lost server to the others.

        Raises: LostServerError: it was the last.
        """
        if not server.is_lost:
            server.is_lost = True
            if self._living():
                say(f"vapo: {error}; the other servers take over", file=sys.stderr)
        if not self._living():
            raise error
        moved = {n: asked for n, asked in self._under_way.items() if asked.server is server}
        for name, asked in moved.items():
            if asked.batch is not None:
                asked.batch.left.discard(name)
            asked.server = min(self._living(), key=lambda server: server.num_asked)
            self._assign(name, asked)
        server.num_asked = 0

    def _drop(self, names: Collection[str]) -> None:
        """Forget requests; a connection of which nothing is left is closed."""
        for name in names:
            asked = self._under_way.pop(name, None)
            if asked is not None:
                asked.server.num_asked -= 1
                if asked.batch is not None:
                    asked.batch.left.discard(name)
                    if not asked.batch.left and asked.batch.connection is not None:
                        hang_up(asked.batch.connection)

    # ---- weights ------------------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load`. Every rank iterates over the weights; they are sent once."""
        num_tensors, push = 0, secrets.token_hex(8)
        for chunk in _chunks(weights):
            num_tensors += len(chunk)
            if rank() == 0:
                self._tell("/weights", safetensors.torch.save(chunk), push, _BINARY)
        if rank() == 0:
            body = json.dumps({"num_tensors": num_tensors}).encode()
            self._tell("/load", body, push, "application/json")
        # Also a rank that has not noticed must not ask a server that has old weights.
        lost = gather_objects([place for place, server in enumerate(self._all) if server.is_lost])
        with self._turn():
            for place in {place for places in lost for place in places}:
                server = self._all[place]
                if not server.is_lost:
                    self._lose(server, LostServerError(f"the rollout server {server.url} is lost"))
        self.has_weights = True

    def _tell(self, path: str, body: bytes, push: str, content_type: str) -> None:
        for server in self._all:
            if not server.is_lost:
                try:
                    server.ask(path, body, push=push, content_type=content_type)
                except LostServerError as error:
                    with self._turn():
                        self._lose(server, error)

    def sleep(self) -> None:
        """Do nothing: the servers share no device with the trainer."""

    def close(self) -> None:
        """Drop what is under way. The servers keep running, for the next run."""
        self.abort(list(self._under_way))


def _chunks(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Cut weights into chunks of a bounded size; tied weights are sent under each name."""
    chunk: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        chunk[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
        if num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = {}, 0
    if chunk:
        yield chunk
