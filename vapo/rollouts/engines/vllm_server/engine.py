"""The `Engine` over several `vllm serve` processes."""

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
from vapo.errors.shown_text import say
from vapo.rollouts.engines.engine import EngineError, Generated, Request, SteppedEngine
from vapo.rollouts.engines.vllm_server.server import LostServerError, ServerAnswer, VllmServer
from vapo.rollouts.engines.vllm_server.weights import WeightTransfer
from vapo.system.distributed import gather_objects, rank, world_size

_CONNECTIONS = 512  # to one server; further requests wait for one that ends
_KEEP_S = 2.0  # for an idle connection, which vLLM closes after 5 s
_WAIT_S = 0.05
_EPISODES = 1 << 16  # the most that are remembered with their servers
_UNTOUCHED = "default"  # vLLM's version before any weights were sent

T = TypeVar("T")


class ServedEngine(SteppedEngine):
    """An `Engine` that samples on `vllm serve` processes at these URLs.

    Each rank samples from its share of the servers; rank 0 sends the weights to all of them. All
    open requests are sampled at once. The turns of an episode go to one server, which has cached
    the earlier turns. Each answer says which weights sampled which of its tokens; weights of
    another run are an error. A server that cannot be reached, hangs, or was started again is lost,
    and its requests go to the others. If it is back at the next push, it is used again.

    Args:
        vocab_size: the number of the policy's tokens. A prompt with a token beyond it is refused,
            since such a token would end vLLM's engine for all its clients.

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
        self._homes: dict[str, VllmServer] = {}  # each episode's server
        self._receivers: list[VllmServer] = []  # of the last push's weights
        self._outcomes: queue.SimpleQueue[tuple[str, Generated | Exception]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.max_tokens = self._in_loop(self._connect(urls))
        except BaseException:
            self.close()
            raise
        places = range(len(urls))[rank() :: world_size()] or [rank() % len(urls)]
        self._servers_of_rank = [self._all[place] for place in places]

    async def _connect(self, urls: Sequence[str]) -> int:
        """Connect to the servers, and return the most tokens of a request that all of them take."""
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
        """Run a coroutine in the event loop's thread, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---- requests -----------------------------------------------------------------------------

    def _begin(self, requests: Mapping[str, Request]) -> None:
        for request in requests.values():
            if not all(0 <= token < self._vocab_size for token in request.prompt_ids):
                raise UserError(
                    f"a prompt has a token beyond the policy's vocabulary of {self._vocab_size}"
                )
        self._in_loop(self._start_requests(requests, self._push))

    async def _start_requests(self, requests: Mapping[str, Request], push: int) -> None:
        """Start requests, which are given by their names, and spread them over the servers.

        Neighbours, which may share a prompt, go to one server. `push` is the number of the last
        push of weights.
        """
        homes = {name: self._home(request) for name, request in requests.items()}
        new = [name for name, home in homes.items() if home is None]
        servers = sorted(self._available_servers(), key=lambda server: server.num_open)
        size = -(-len(new) // len(servers))
        homes |= {name: servers[place // size] for place, name in enumerate(new)}
        for name, home in homes.items():
            assert home is not None
            work = self._sample(name, requests[name], push, home)
            self._under_way[name] = self._loop.create_task(work)

    async def _sample(self, name: str, request: Request, push: int, server: VllmServer) -> None:
        """Sample a response, on another server if this one is lost, and queue the outcome.

        The outcome is the response or an error. `push` is the number of the last push of weights
        when the request was made.
        """
        outcome: Generated | Exception
        try:
            while True:
                self._remember(request, server)
                try:
                    answer = await server.generate(name, request, self._vocab_size)
                    outcome = self._generated(answer, push, server)
                    break
                except LostServerError as error:
                    self._mark_lost(server, error)
                    server = min(self._available_servers(), key=lambda server: server.num_open)
        except Exception as error:  # `_step` raises it for the caller
            outcome = error
        self._outcomes.put((name, outcome))

    def _generated(self, answer: ServerAnswer, previous_push: int, server: VllmServer) -> Generated:
        """Turn a server's answer into a result whose updates are counted from `previous_push`.

        That is the number of the last push of weights when the request was made.

        Raises:
            LostServerError: the server has no weights, as it was started again.
            EngineError: the server sampled with weights that this run did not send.
        """
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
            # a request that came while weights were sent may have begun with older ones
            updates.append((max(0, int(push) - previous_push), num_tokens))
        return Generated(answer.ids, answer.logprobs, tuple(updates))

    def _home(self, request: Request) -> VllmServer | None:
        home = self._homes.get(request.episode) if request.episode is not None else None
        return None if home is None or home.is_lost else home

    def _remember(self, request: Request, server: VllmServer) -> None:
        if request.episode is not None:
            self._homes[request.episode] = server
            if len(self._homes) > _EPISODES:
                del self._homes[next(iter(self._homes))]

    def _available_servers(self) -> list[VllmServer]:
        """Return this rank's servers that are not lost; if it has none, those of all ranks.

        Raises: LostServerError: all servers are lost.
        """
        available = [server for server in self._servers_of_rank if not server.is_lost]
        available = available or [server for server in self._all if not server.is_lost]
        if not available:
            raise LostServerError("every rollout server is lost")
        return available

    def _mark_lost(self, server: VllmServer, error: LostServerError) -> None:
        """Mark a server as lost. Raises: LostServerError: all servers are lost now."""
        was_lost = server.is_lost
        server.mark_lost()
        if all(other.is_lost for other in self._all):
            raise error
        if not was_lost:
            say(f"vapo: {error}; the other servers take over", file=sys.stderr)

    def _step(self) -> dict[str, Generated]:
        results: dict[str, Generated] = {}
        timeout = _WAIT_S
        with suppress(queue.Empty):
            while True:
                name, result = self._outcomes.get(timeout=timeout)
                timeout = 0.0
                if self._under_way.pop(name, None) is None:  # it was dropped
                    continue
                if isinstance(result, Exception):
                    raise result
                results[name] = result
        return results

    def _drop(self, names: Collection[str]) -> None:
        """Cancel the requests with these names. A server ends one whose connection is closed."""
        for name in names:
            task = self._under_way.pop(name, None)
            if task is not None:
                self._loop.call_soon_threadsafe(task.cancel)

    # ---- weights ------------------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send new weights to all servers. Every rank must call this and iterate over the weights.

        Rank 0 sends them once, to all servers at a time. Open requests go on with them. Servers
        that were lost and are back get the weights, too.
        """
        self._transfer.prepare()
        remaining_weights, receivers, problem = iter(weights), list[int](), None
        for server in self._all:
            server.is_paused = True  # it samples nothing now, and does not count as hung
        try:
            if rank() == 0:
                receivers = self._send(remaining_weights)
            deque(remaining_weights, maxlen=0)  # gathering a shard takes all ranks
        except Exception as error:  # the other ranks must learn of it
            problem = error
        finally:
            deque(remaining_weights, maxlen=0)
            for server in self._all:
                server.is_paused = False
        problem_text = "" if problem is None else str(problem) or type(problem).__name__
        reported_problem, receivers = gather_objects((problem_text, receivers))[0]
        if problem is not None or reported_problem:
            raise problem or EngineError(reported_problem)
        self._push += 1
        self._in_loop(self._use_receivers(receivers))
        self.has_weights = True

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> list[int]:
        """Pause the servers that can be reached, send them the weights, and let all servers resume.

        Return the indices in `self._all` of the servers that took the weights.

        Raises:
            LostServerError: all servers are lost.
            EngineError: a server refuses.
        """
        receivers = self._in_loop(self._reachable())

        def tell(path: str, body: Callable[[int], Mapping[str, Any]] = lambda place: {}) -> None:
            for server in self._in_loop(self._post_to_all(receivers, path, body)):
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
        """Let all servers resume sampling, also those that did not get all weights.

        A server that cannot be reached now samples nothing, and is found to be lost later.
        """
        calls = (server.call_route("POST", "/resume") for server in self._all)
        await asyncio.gather(*calls, return_exceptions=True)

    async def _reachable(self) -> list[VllmServer]:
        """Return the servers that answer, also lost ones that are back; mark all others as lost.

        Raises: LostServerError: all servers are lost.
        """
        versions = await asyncio.gather(*(server.weight_version() for server in self._all))
        for server, version in zip(self._all, versions, strict=True):
            if version is None:
                self._mark_lost(server, LostServerError(f"the rollout server {server.url} is lost"))
            elif version != f"{self._run}-{self._push}" and server in self._receivers:
                self._receivers.remove(server)  # it was started again
        return [s for s, version in zip(self._all, versions, strict=True) if version is not None]

    async def _post_to_all(
        self, servers: Sequence[VllmServer], path: str, body: Callable[[int], Mapping[str, Any]]
    ) -> list[VllmServer]:
        """Post to all of these servers at once, and return the servers that are lost.

        `path` is the route, and `body` returns the request's JSON for the index of a server.
        A server whose last update was not finished takes no other update, and counts as lost.

        Raises: EngineError: a server refuses.
        """
        calls = (
            server.call_route("POST", path, body(place)) for place, server in enumerate(servers)
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        lost_servers = []
        for server, answer in zip(servers, answers, strict=True):
            if not isinstance(answer, BaseException):
                continue
            if not isinstance(answer, EngineError):
                raise answer
            if path == "/start_weight_update":
                answer = LostServerError(f"{answer}; start this server again")
            elif not isinstance(answer, LostServerError) and await server.weight_version():
                raise answer
            self._mark_lost(server, LostServerError(str(answer)))
            lost_servers.append(server)
        return lost_servers

    async def _world_sizes(self, servers: Sequence[VllmServer]) -> list[int]:
        sizes = await asyncio.gather(*(s.call_route("GET", "/get_world_size") for s in servers))
        return [int(size["world_size"]) for size in sizes]

    async def _use_receivers(self, receivers: Collection[int]) -> None:
        """Mark the servers as lost or not, by whether they have the new weights.

        `receivers` are the indices in `self._all` of those that have them, equal on all ranks.
        """
        for place, server in enumerate(self._all):
            if place in receivers and server.is_lost:
                server.is_lost = False
                self._watches[server].cancel()
                self._watches[server] = self._watch(server)
            elif place not in receivers and not server.is_lost:
                self._mark_lost(server, LostServerError(f"the rollout server {server.url} is lost"))

    def sleep(self) -> None:
        """Do nothing: the servers share no device with the trainer."""

    def close(self) -> None:
        """Cancel all open requests, and close the connections. The servers keep running."""
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
    """Open an HTTP session with at most `max_connections` connections to a server; 0: no limit."""
    connector = aiohttp.TCPConnector(
        limit=0, limit_per_host=max_connections, keepalive_timeout=_KEEP_S
    )
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
