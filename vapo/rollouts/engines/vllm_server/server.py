"""One `vllm serve` process, asked over HTTP, and its answers, checked before any is used."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import aiohttp

from vapo.rollouts.engines.engine import RESUME_HINT, EngineError, Request

HOW = "start it with `vapo serve`"
_GENERATE = "/inference/v1/generate"
_COUNTER = "vllm:generation_tokens_total"
_ALIVE_S, _LOST_S = 60.0, 5.0  # for an answer of one that samples, and of one that was lost
_NO_LOGPROB = -9999.0  # what vLLM sends for one that is not finite


class ServerAnswer(NamedTuple):
    """Sampled tokens, an end token included, their log-probs, and the weights that sampled them.

    `versions` are (version, number of tokens), in order; a log-prob that is not finite is NaN.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[str, int], ...]


def read_answer(
    record: Any, name: str, request: Request, vocab_size: int, url: str
) -> ServerAnswer:
    """The answer of `/inference/v1/generate`, held to what was asked for.

    Raises: EngineError: it is wrong; the message names the server and what is wrong.
    """
    try:
        choice = _choice(record, name)
        ids = _ids(choice.get("token_ids"), request, vocab_size)
        _check_end(ids, choice.get("finish_reason"), request)
        versions = _versions(choice.get("weight_versions"), len(ids))
        return ServerAnswer(ids, _logprobs(choice, ids), versions)
    except _WrongError as wrong:
        raise EngineError(f"the rollout server {url} gave a wrong answer: {wrong}") from None


def is_aborted(record: Any) -> bool:
    """Whether the server was told to stop while it sampled."""
    choices = record.get("choices") if isinstance(record, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and first.get("finish_reason") == "abort"


class _WrongError(Exception):
    """What is wrong with an answer."""


def _choice(record: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise _WrongError("it is no JSON object")
    found = record.get("request_id")
    if not isinstance(found, str) or not found.endswith(name):
        raise _WrongError(f"it is for the request {str(found)[:80]!r}, not {name!r}")
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _WrongError("it has not just one response")
    return choices[0]


def _ids(found: Any, request: Request, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(found, list) or not found or not all(type(x) is int for x in found):
        raise _WrongError("token_ids are not one or more whole numbers")
    if len(found) > request.budget:
        raise _WrongError(f"it has {len(found)} tokens, and at most {request.budget} were asked")
    strange = next((x for x in found if not 0 <= x < vocab_size), None)
    if strange is not None:
        raise _WrongError(f"token {strange} is not in the vocabulary of {vocab_size}")
    return tuple(found)


def _check_end(ids: tuple[int, ...], reason: Any, request: Request) -> None:
    """A response ends with its first end token, or when its tokens are used up."""
    place = next((i for i, x in enumerate(ids) if x in request.end_ids), None)
    if place is not None and place + 1 < len(ids):
        raise _WrongError(f"it goes on after the end token {ids[place]}")
    if place is None and len(ids) < request.budget:
        raise _WrongError(
            f"it ends after {len(ids)} of {request.budget} tokens without an end token "
            f"(finish_reason {str(reason)[:80]!r})"
        )


def _logprobs(choice: Mapping[str, Any], ids: Sequence[int]) -> tuple[float, ...]:
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(content, list) or len(content) != len(ids):
        num = len(content) if isinstance(content, list) else 0
        raise _WrongError(f"it has {num} log-probs for {len(ids)} tokens")
    found = []
    for token, entry in zip(ids, content, strict=True):
        if not isinstance(entry, dict) or entry.get("token_id") != token:
            raise _WrongError(f"a log-prob is not that of its token {token}")
        value = entry.get("logprob")  # JSON has no NaN: null
        if value is not None and type(value) not in (int, float):
            raise _WrongError(f"the log-prob of token {token} is no number")
        value = math.nan if value is None or value <= _NO_LOGPROB else float(value)
        if value > 1e-3:
            raise _WrongError(f"the log-prob of token {token} is {value:g}, above 0")
        found.append(value)
    return tuple(found)


def _versions(spans: Any, num_tokens: int) -> tuple[tuple[str, int], ...]:
    """The spans as (version, number of tokens), which follow each other over all tokens."""
    try:
        found = [(span["version"], span["start"], span["end"]) for span in spans]
        edges = [0, *(end for _, _, end in found)]
        is_whole = edges[-1] == num_tokens and all(a < b for a, b in pairwise(edges))
        is_whole = is_whole and [start for _, start, _ in found] == edges[:-1]
    except (TypeError, KeyError):
        is_whole = False
    if not is_whole or not all(isinstance(version, str) for version, _, _ in found):
        raise _WrongError("weight_versions do not say of each token which weights sampled it")
    return tuple((version, end - start) for version, start, end in found)


class LostServerError(EngineError):
    """A server cannot be reached, has ended, or hangs."""


class VllmServer:
    """The address of one server, and what it is doing for this process.

    All methods run in the thread of one event loop. A server that has open requests and samples no
    token for `timeout_s` is lost (`watch`): its requests end in a `LostServerError`.

    Args:
        sampling: with a limit of connections, for which requests wait.
        control: for everything else, which must not wait for them.
    """

    def __init__(
        self,
        url: str,
        *,
        sampling: aiohttp.ClientSession,
        control: aiohttp.ClientSession,
        timeout_s: float,
    ) -> None:
        self.url = url
        self.is_lost = False
        self.num_open = 0
        self.is_paused = False
        self._sampling, self._control, self._timeout_s = sampling, control, timeout_s
        self._requests: set[asyncio.Task[Any]] = set()
        self._num_answers = 0

    async def generate(self, name: str, request: Request, vocab_size: int) -> ServerAnswer:
        """Sample one response.

        Raises:
            LostServerError: it is not there (any more).
            EngineError: it refuses the request, or gives a wrong answer.
        """
        body = {
            "request_id": name,
            "token_ids": request.prompt_ids,
            "sampling_params": request.parameters(),
        }
        if self.is_lost:
            raise LostServerError(f"the rollout server {self.url} is lost")
        task = asyncio.ensure_future(self._request("POST", _GENERATE, body))
        self._requests.add(task)
        self.num_open += 1
        try:
            record = await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self.is_lost and task.cancelled() and not (own and own.cancelling()):
                raise LostServerError(
                    f"the rollout server {self.url} has given no token for {self._timeout_s:g} s "
                    f"(rollouts.servers.timeout_s) and counts as hung; {RESUME_HINT}"
                ) from None
            raise
        finally:
            task.cancel()
            self._requests.discard(task)
            self.num_open -= 1
        self._num_answers += 1
        if is_aborted(record):
            raise LostServerError(f"the rollout server {self.url} has been stopped")
        return read_answer(record, name, request, vocab_size, self.url)

    async def watch(self) -> None:
        """Lose the server once it counts as hung; return when it is lost."""
        seen: tuple[int, str | None] | None = None
        since = time.monotonic()
        while not self.is_lost:
            await asyncio.sleep(min(self._timeout_s / 8, 5.0))
            now = (self._num_answers, await self._counter()) if self.num_open else None
            if now is None or seen is None or self.is_paused or _has_moved(seen, now):
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._timeout_s:
                self.lose()

    def lose(self) -> None:
        """End its requests with a `LostServerError`."""
        self.is_lost = True
        for task in self._requests:
            task.cancel()

    async def _counter(self) -> str | None:
        """How many tokens it has sampled, as it says; None where it says nothing in time."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s / 4)
        try:
            async with self._control.get(f"{self.url}/metrics", timeout=timeout) as response:
                text = await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        return "".join(line for line in text.splitlines() if line.startswith(_COUNTER))

    async def max_tokens(self) -> int:
        """The most tokens of prompt and response together.

        Raises: LostServerError, EngineError: it lacks what a trainer needs of it.
        """
        models = await self.ask("GET", "/v1/models")
        await self.ask("GET", "/is_paused")
        try:
            return int(models["data"][0]["max_model_len"])
        except (TypeError, KeyError, IndexError, ValueError):
            raise EngineError(f"{self.url} is no vLLM server: {HOW}") from None

    async def weight_version(self) -> str | None:
        """The version of its weights; None where it does not answer, or its engine has ended."""
        seconds = min(self._timeout_s, _LOST_S if self.is_lost else _ALIVE_S)
        try:
            await self.ask("GET", "/health", timeout_s=seconds)
            found = await self.ask("GET", "/weight_info", timeout_s=seconds)
        except EngineError:
            return None
        return str(found.get("weight_version")) if isinstance(found, dict) else None

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Ask one of the routes that answer at once; the JSON that came.

        Raises: LostServerError, EngineError with the server's own message.
        """
        seconds = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await self._request(method, path, body)
        except TimeoutError:
            raise LostServerError(
                f"the rollout server {self.url} has not answered {path} for {seconds:g} s and "
                f"counts as hung; {RESUME_HINT}"
            ) from None

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        session = self._sampling if path == _GENERATE else self._control
        try:
            async with session.request(method, self.url + path, json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise LostServerError(
                f"the rollout server {self.url} does not answer: {reason}; is `vapo serve` running "
                f"there? {RESUME_HINT}"
            ) from error
        try:
            record = json.loads(text)
        except ValueError:
            record = None
        if response.status == 200:
            return record
        said = record.get("error", record.get("detail")) if isinstance(record, dict) else None
        said = said.get("message") if isinstance(said, dict) else said
        message = f"the rollout server {self.url} answered {path} with status {response.status}"
        if response.status == 404:
            raise EngineError(f"{message}: it has no such route; {HOW}, which sets what it needs")
        message += f": {' '.join(str(said or text).split())[:300]}"
        if response.status >= 500 and path == _GENERATE:  # vLLM's, once its engine has ended
            raise LostServerError(f"{message}; {RESUME_HINT}")
        raise EngineError(message)


def _has_moved(seen: tuple[int, str | None], now: tuple[int, str | None]) -> bool:
    """Whether it has answered, or sampled a token, since; what it did not say is no sign."""
    return now[0] != seen[0] or (now[1] is not None and now[1] != seen[1])
