"""The client of one `vllm serve` process, which checks each answer before it is used."""

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
_ALIVE_S, _LOST_S = 60.0, 5.0  # to wait for a server that samples, and for one that was lost
_NO_LOGPROB = -9999.0  # vLLM sends it for a log-prob that is not finite


class ServerAnswer(NamedTuple):
    """A server's response to a request, checked: token ids, an end token included, and log-probs.

    A log-prob that is not finite is NaN. `versions` says which weights sampled the tokens: pairs
    (version of the weights, number of tokens), in order.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[str, int], ...]


def read_answer(
    record: Any, name: str, request: Request, vocab_size: int, url: str
) -> ServerAnswer:
    """Check an answer of `/inference/v1/generate` against its request, and return it.

    Raises: EngineError: the answer is wrong; the message names the server and what is wrong.
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
    """Whether a server's answer says that it was stopped while it sampled."""
    choices = record.get("choices") if isinstance(record, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and first.get("finish_reason") == "abort"


class _WrongError(Exception):
    """Raised for a wrong answer of a server; its text says what is wrong."""


def _choice(record: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise _WrongError("it is not a JSON object")
    request_id = record.get("request_id")
    if not isinstance(request_id, str) or not request_id.endswith(name):
        raise _WrongError(f"it is for the request {str(request_id)[:80]!r}, not {name!r}")
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _WrongError("it does not have exactly one response")
    return choices[0]


def _ids(ids: Any, request: Request, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or not all(type(x) is int for x in ids):
        raise _WrongError("token_ids are not one or more whole numbers")
    if len(ids) > request.budget:
        raise _WrongError(f"it has {len(ids)} tokens, and at most {request.budget} were requested")
    strange = next((x for x in ids if not 0 <= x < vocab_size), None)
    if strange is not None:
        raise _WrongError(f"token {strange} is not in the vocabulary of {vocab_size}")
    return tuple(ids)


def _check_end(ids: tuple[int, ...], reason: Any, request: Request) -> None:
    """Check that a response ends with its first end token, or has as many tokens as requested.

    Raises: _WrongError: it does not.
    """
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
    logprobs = []
    for token, entry in zip(ids, content, strict=True):
        if not isinstance(entry, dict) or entry.get("token_id") != token:
            raise _WrongError(f"the log-prob at token {token} belongs to another token")
        value = entry.get("logprob")  # JSON has no NaN: null
        if value is not None and type(value) not in (int, float):
            raise _WrongError(f"the log-prob of token {token} is not a number")
        value = math.nan if value is None or value <= _NO_LOGPROB else float(value)
        if value > 1e-3:
            raise _WrongError(f"the log-prob of token {token} is {value:g}, above 0")
        logprobs.append(value)
    return tuple(logprobs)


def _versions(spans: Any, num_tokens: int) -> tuple[tuple[str, int], ...]:
    """Return which weights sampled the tokens, as pairs (version, number of tokens).

    `spans` are a server's objects with version, start and end.

    Raises: _WrongError: they do not cover all tokens without gaps.
    """
    try:
        triples = [(span["version"], span["start"], span["end"]) for span in spans]
        edges = [0, *(end for _, _, end in triples)]
        is_whole = edges[-1] == num_tokens and all(a < b for a, b in pairwise(edges))
        is_whole = is_whole and [start for _, start, _ in triples] == edges[:-1]
    except (TypeError, KeyError):
        is_whole = False
    if not is_whole or not all(isinstance(version, str) for version, _, _ in triples):
        raise _WrongError("weight_versions do not say of each token which weights sampled it")
    return tuple((version, end - start) for version, start, end in triples)


class LostServerError(EngineError):
    """A server cannot be reached, has ended, or hangs."""


class VllmServer:
    """The client of one `vllm serve` process, with the requests that this process has open there.

    All methods run in the thread of one event loop. A server that has open requests and samples no
    token for `timeout_s` is lost (`watch`): its requests end in a `LostServerError`.

    Args:
        sampling: the HTTP session for requests, which wait if it has no free connection.
        control: the HTTP session for everything else, which must not wait for requests.
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
        """Sample one response on the server, and return it checked.

        Raises:
            LostServerError: the server is lost, or does not answer.
            EngineError: the server refuses the request, or gives a wrong answer.
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
            running = asyncio.current_task()
            if self.is_lost and task.cancelled() and not (running and running.cancelling()):
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
        """Mark the server as lost once it has sampled no token for `timeout_s`, and then return."""
        last: tuple[int, str | None] | None = None
        since = time.monotonic()
        while not self.is_lost:
            await asyncio.sleep(min(self._timeout_s / 8, 5.0))
            progress = (self._num_answers, await self._counter()) if self.num_open else None
            if progress is None or last is None or self.is_paused or _has_moved(last, progress):
                last, since = progress, time.monotonic()
            elif time.monotonic() - since > self._timeout_s:
                self.mark_lost()

    def mark_lost(self) -> None:
        """Mark the server as lost. Its open requests end in a `LostServerError`."""
        self.is_lost = True
        for task in self._requests:
            task.cancel()

    async def _counter(self) -> str | None:
        """Return the server's counters of sampled tokens; None if it does not answer in time."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s / 4)
        try:
            async with self._control.get(f"{self.url}/metrics", timeout=timeout) as response:
                text = await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        return "".join(line for line in text.splitlines() if line.startswith(_COUNTER))

    async def max_tokens(self) -> int:
        """Return the most tokens of prompt and response together that the server takes.

        Raises: LostServerError, EngineError: the server lacks what a trainer needs.
        """
        models = await self.call_route("GET", "/v1/models")
        await self.call_route("GET", "/is_paused")
        try:
            return int(models["data"][0]["max_model_len"])
        except (TypeError, KeyError, IndexError, ValueError):
            raise EngineError(f"{self.url} is not a vLLM server: {HOW}") from None

    async def weight_version(self) -> str | None:
        """Return the version of the server's weights; None: no answer, or its engine has ended."""
        seconds = min(self._timeout_s, _LOST_S if self.is_lost else _ALIVE_S)
        try:
            await self.call_route("GET", "/health", timeout_s=seconds)
            info = await self.call_route("GET", "/weight_info", timeout_s=seconds)
        except EngineError:
            return None
        return str(info.get("weight_version")) if isinstance(info, dict) else None

    async def call_route(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Call a route that answers at once, and return the JSON of its answer.

        Raises:
            LostServerError: the server does not answer within `timeout_s`, or if that is None
                within the client's limit.
            EngineError: the server refuses; the error has its message.
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
        detail = record.get("error", record.get("detail")) if isinstance(record, dict) else None
        detail = detail.get("message") if isinstance(detail, dict) else detail
        message = f"the rollout server {self.url} answered {path} with status {response.status}"
        if response.status == 404:
            raise EngineError(f"{message}: it has no such route; {HOW}, which sets what it needs")
        message += f": {' '.join(str(detail or text).split())[:300]}"
        if response.status >= 500 and path == _GENERATE:  # vLLM's, once its engine has ended
            raise LostServerError(f"{message}; {RESUME_HINT}")
        raise EngineError(message)


def _has_moved(last: tuple[int, str | None], progress: tuple[int, str | None]) -> bool:
    """Whether a server has answered or sampled between two looks at (answers, token counters).

    A counter that is None was not to be had.
    """
    return progress[0] != last[0] or (progress[1] is not None and progress[1] != last[1])
