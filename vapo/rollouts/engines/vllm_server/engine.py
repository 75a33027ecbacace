"""`vllm serve` processes as one `Engine`."""

from __future__ import annotations

import asyncio
import queue
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp
from torch import Tensor

from vapo.errors import UserError
from vapo.rollouts.engines.engine import EngineError, Generated, Request, SteppedEngine
from vapo.rollouts.engines.vllm_server.server import LostServerError, ServerAnswer, VllmServer
from vapo.rollouts.engines.vllm_server.weights import WeightTransfer
from vapo.system.distributed import gather_objects, rank, world_size
from vapo.system.shown_text import say

_CONNECTIONS = 512  # to one server; further requests wait for one that ends
_KEEP_S = 2.0  # an idle connection: vLLM closes it after 5 s
_WAIT_S = 0.05
_EPISODES = 1 << 16  # whose servers are remembered
_UNTOUCHED = "default"  # vLLM's version of weights that nobody has sent

T = TypeVar("T")


class ServedEngine(SteppedEngine):
    """See `Engine`. Each rank samples from its share of the servers; rank 0 feeds them all.

    All requests are under way at once; turns of an episode go to one server, which has what it
    computed for the earlier ones. Each answer says which weights sampled which of its tokens: those
    of another run, or of nobody, are an error. A server that cannot be reached, or hangs, is lost:
    its requests go to the others. With the next push it is taken up again if it is back.

    Args:
        vocab_size: of the policy; other tokens end vLLM's engine, for everybody.

    Raises: EngineError: a server is not there, or lacks what a trainer needs.
    """

    def __init__(
        self, urls: Sequence[str], transfer: WeightTransfer, *, vocab_size: int, timeout_s: float
    ) -> None:
        super().__init__()
        self._transfer, self._vocab_size, self._timeout_s = transfer, vocab_size, timeout_s
        self._run = gather_objects(secrets.token_hex(8))[0]
        self._push = 0
        self.has_weights = False
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._homes: dict[str, VllmServer] = {}  # of episodes
        self._receivers: list[VllmServer] = []  # of the last push
        self._ended: queue.SimpleQueue[tuple[str, Generated | Exception]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.max_tokens = self._in_loop(self._connect(urls))
        except BaseException:
            self.close()
            raise
        mine = range(len(urls))[rank() :: world_size()] or [rank() % len(urls)]
        self._mine = [self._all[place] for place in mine]

    async def _connect(self, urls: Sequence[str]) -> int:
        """The most tokens of prompt and response that each of the servers takes."""
        sampling, control = self._sessions = _session(_CONNECTIONS), _session(0)
        self._all = [
            VllmServer(url, sampling=sampling, control=control, timeout_s=self._timeout_s)
            for url in urls
        ]
        self._watches = {server: self._watch(server) for server in self._all}
        return min(await asyncio.gather(*(server.max_tokens() for server in self._all)))

    def _watch(self, server: VllmServer) -> asyncio.Task[None]:
        return self._loop.create_task(server.watch())

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the thread of the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---- requests -----------------------------------------------------------------------------

    def _begin(self, requests: Mapping[str, Request]) -> None:
        for request in requests.values():
            if not all(0 <= token < self._vocab_size for token in request.prompt_ids):
                raise UserError(
                    f"a prompt has a token beyond the policy's vocabulary of {self._vocab_size}"
                )
        self._in_loop(self._ask(requests, self._push))

    async def _ask(self, requests: Mapping[str, Request], push: int) -> None:
        """Begin requests; neighbours, which may have one prompt, are on one server."""
        homes = {name: self._home(request) for name, request in requests.items()}
        new = [name for name, home in homes.items() if home is None]
        servers = sorted(self._living(), key=lambda server: server.num_open)
        size = -(-len(new) // len(servers))
        homes |= {name: servers[place // size] for place, name in enumerate(new)}
        for name, home in homes.items():
            assert home is not None
            work = self._sample(name, requests[name], push, home)
            self._under_way[name] = self._loop.create_task(work)

    async def _sample(self, name: str, request: Request, push: int, server: VllmServer) -> None:
        """Sample a response, on another server if this one is lost; `push` was the last before."""
        found: Generated | Exception
        try:
            while True:
                self._remember(request, server)
                try:
                    answer = await server.generate(name, request, self._vocab_size)
                    found = self._generated(answer, push, server)
                    break
                except LostServerError as error:
                    self._lose(server, error)
                    server = min(self._living(), key=lambda server: server.num_open)
        except Exception as error:  # it is the caller's to handle
            found = error
        self._ended.put((name, found))

    def _generated(self, answer: ServerAnswer, before: int, server: VllmServer) -> Generated:
        """Raises: LostServerError, EngineError: weights sampled it that this run has not sent."""
        updates = []
        for version, num_tokens in answer.versions:
            run, _, push = version.rpartition("-")
            if version == _UNTOUCHED:
                raise LostServerError(
                    f"the rollout server {server.url} has been started again, without weights"
                )
            if run != self._run or not push.isdigit() or int(push) > self._push + 1:
                raise EngineError(
                    f"the rollout server {server.url} samples with weights that this run has not "
                    f"sent (version {version[:80]!r}): another run uses it; each run needs servers "
                    "of its own (rollouts.servers.urls)"
                )
            # a request that came while weights were sent may have begun before them
            updates.append((max(0, int(push) - before), num_tokens))
        return Generated(answer.ids, answer.logprobs, tuple(updates))

    def _home(self, request: Request) -> VllmServer | None:
        home = self._homes.get(request.episode) if request.episode is not None else None
        return None if home is None or home.is_lost else home

    def _remember(self, request: Request, server: VllmServer) -> None:
        if request.episode is not None:
            self._homes[request.episode] = server
            if len(self._homes) > _EPISODES:
                del self._homes[next(iter(self._homes))]

    def _living(self) -> list[VllmServer]:
        """This rank's servers, or all once its own are lost.

        Raises: LostServerError: none is left.
        """
        living = [server for server in self._mine if not server.is_lost]
        living = living or [server for server in self._all if not server.is_lost]
        if not living:
            raise LostServerError("every rollout server is lost")
        return living

    def _lose(self, server: VllmServer, error: LostServerError) -> None:
        """Raises: LostServerError: it was the last."""
        was_lost = server.is_lost
        server.lose()
        if all(other.is_lost for other in self._all):
            raise error
        if not was_lost:
            say(f"vapo: {error}; the other servers take over", file=sys.stderr)

    def _step(self) -> dict[str, Generated]:
        found: dict[str, Generated] = {}
        timeout = _WAIT_S
        with suppress(queue.Empty):
            while True:
                name, result = self._ended.get(timeout=timeout)
                timeout = 0.0
                if self._under_way.pop(name, None) is None:  # it was dropped
                    continue
                if isinstance(result, Exception):
                    raise result
                found[name] = result
        return found

    def _drop(self, names: Collection[str]) -> None:
        """Forget requests; a server ends one whose connection is closed."""
        for name in names:
            task = self._under_way.pop(name, None)
            if task is not None:
                self._loop.call_soon_threadsafe(task.cancel)

    # ---- weights ------------------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load`. Every rank iterates over the weights; they are sent once, to all
        servers at a time, while requests under way are kept.

        Servers that were lost and are back get them, too.
        """
        self._transfer.prepare()
        left, receivers, problem = iter(weights), list[int](), None
        for server in self._all:
            server.is_paused = True  # it samples nothing now, and does not count as hung
        try:
            if rank() == 0:
                receivers = self._send(left)
            deque(left, maxlen=0)  # gathering a shard takes all ranks
        except Exception as error:  # the other ranks must hear of it
            problem = error
        finally:
            deque(left, maxlen=0)
            for server in self._all:
                server.is_paused = False
        why = "" if problem is None else str(problem) or type(problem).__name__
        said, receivers = gather_objects((why, receivers))[0]
        if problem is not None or said:
            raise problem or EngineError(said)
        self._push += 1
        self._in_loop(self._agree(receivers))
        self.has_weights = True

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> list[int]:
        """The places of the servers that have taken the weights."""
        receivers = self._in_loop(self._reachable())

        def tell(path: str, body: Callable[[int], Mapping[str, Any]] = lambda place: {}) -> None:
            for server in self._in_loop(self._told(receivers, path, body)):
                receivers.remove(server)
            if not receivers:
                raise LostServerError("every rollout server is lost")

        try:
            tell("/pause?mode=keep")
            if self._receivers != receivers:
                self._transfer.begin(tell, self._in_loop(self._world_sizes(receivers)))
            self._transfer.send(weights, f"{self._run}-{self._push + 1}", tell)
            self._receivers = list(receivers)
        finally:
            self._in_loop(self._resume())
        return [self._all.index(server) for server in receivers]

    async def _resume(self) -> None:
        """Let all servers go on, those too that have not got everything.

        One that does not hear it samples nothing, and is lost for that.
        """
        asked = (server.ask("POST", "/resume") for server in self._all)
        await asyncio.gather(*asked, return_exceptions=True)

    async def _reachable(self) -> list[VllmServer]:
        """The servers that are not lost, and those that are back."""
        versions = await asyncio.gather(*(server.weight_version() for server in self._all))
        for server, version in zip(self._all, versions, strict=True):
            if version is None:
                self._lose(server, LostServerError(f"the rollout server {server.url} is lost"))
            elif version != f"{self._run}-{self._push}" and server in self._receivers:
                self._receivers.remove(server)  # it was started again
        return [s for s, version in zip(self._all, versions, strict=True) if version is not None]

    async def _told(
        self, servers: Sequence[VllmServer], path: str, body: Callable[[int], Mapping[str, Any]]
    ) -> list[VllmServer]:
        """Tell all of them at once; those that are lost. Raises: EngineError: one refuses.

        One whose last update never came to its end takes no other, and is lost.
        """
        asked = (server.ask("POST", path, body(place)) for place, server in enumerate(servers))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        lost = []
        for server, answer in zip(servers, answers, strict=True):
            if not isinstance(answer, BaseException):
                continue
            if not isinstance(answer, EngineError):
                raise answer
            if path == "/start_weight_update":
                answer = LostServerError(f"{answer}; start this server again")
            elif not isinstance(answer, LostServerError) and await server.weight_version():
                raise answer
            self._lose(server, LostServerError(str(answer)))
            lost.append(server)
        return lost

    async def _world_sizes(self, servers: Sequence[VllmServer]) -> list[int]:
        sizes = await asyncio.gather(*(s.ask("GET", "/get_world_size") for s in servers))
        return [int(size["world_size"]) for size in sizes]

    async def _agree(self, receivers: Collection[int]) -> None:
        """Use the servers that have the new weights, and no other: on every rank the same."""
        for place, server in enumerate(self._all):
            if place in receivers and server.is_lost:
                server.is_lost = False
                self._watches[server].cancel()
                self._watches[server] = self._watch(server)
            elif place not in receivers and not server.is_lost:
                self._lose(server, LostServerError(f"the rollout server {server.url} is lost"))

    def sleep(self) -> None:
        """Do nothing: the servers share no device with the trainer."""

    def close(self) -> None:
        """Drop what is under way. The servers keep running, for the next run."""
        if not self._thread.is_alive():
            return
        self._in_loop(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._transfer.close()

    async def _disconnect(self) -> None:
        tasks = [*self._under_way.values(), *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._under_way = {}
        for session in self._sessions:
            await session.close()


def _session(max_connections: int) -> aiohttp.ClientSession:
    """Connections to servers, at most so many to each; 0: no limit."""
    connector = aiohttp.TCPConnector(
        limit=0, limit_per_host=max_connections, keepalive_timeout=_KEEP_S
    )
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
