"""The interface of a vLLM engine, and the code that its implementations share.

`SteppedEngine` is the base of engines that sample in steps. `TensorParallelEngine` makes the ranks
of a group one engine.
"""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from vapo.errors import UserError
from vapo.rollouts.engines.contract import SamplingSettings

RESUME_HINT = "the last checkpoint is intact: resume from it with `--ckpt_path last`"


class EngineError(UserError):
    """The engine died, hangs, has too little memory, or has not taken the weights."""


@dataclass(frozen=True)
class Request:
    """One response to sample. Equal requests give equal responses, whatever else is sampled.

    The response ends with one of `end_ids`, or when it has `budget` tokens: the smaller one of
    `max_tokens` and the settings' `max_response_tokens`. Requests with the same `episode` are its
    turns: the engine may keep what it computed for one turn until the next.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    settings: SamplingSettings
    end_ids: frozenset[int] = frozenset()
    max_tokens: int | None = None
    episode: str | None = None

    @property
    def budget(self) -> int:
        """The largest number of tokens that may be sampled."""
        limit = self.settings.max_response_tokens
        return limit if self.max_tokens is None else min(self.max_tokens, limit)

    def parameters(self) -> dict[str, Any]:
        """Return the request as vLLM's sampling parameters."""
        settings, greedy = self.settings, self.settings.greedy
        return {
            "max_tokens": self.budget,
            "temperature": 0.0 if greedy else settings.temperature,
            "top_p": 1.0 if greedy else settings.top_p,
            "top_k": 0 if greedy else settings.top_k,
            "seed": self.seed,  # without one vLLM draws it from the process-wide generator
            "stop_token_ids": sorted(self.end_ids),
            "ignore_eos": True,  # the end tokens are those named above, no others
            "logprobs": 0,  # the sampled token's log-prob alone
            "detokenize": False,
        }


@dataclass(frozen=True)
class Generated:
    """The sampled tokens, an end token included, each with its log-prob.

    `updates` says which weights sampled the tokens. Each pair has the number of weight updates
    since the request was made, and a number of tokens, in order. If it is empty, the weights at the
    time of the request sampled all tokens.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    updates: tuple[tuple[int, int], ...] = ()


class Engine(Protocol):
    """A vLLM engine: takes requests at any time and samples responses to them together."""

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of prompt and response together."""

    @property
    def has_weights(self) -> bool:
        """Whether the engine has weights: they were loaded and have not been discarded since."""

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share one engine. Then all of them must call `results` equally
        often, until no rank has an open request (`leave`)."""

    def submit(self, requests: Mapping[str, Request]) -> None:
        """Begin requests. Each has a name from the caller, which no open request may have."""

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        """Return by name the results of these requests that are ready, each once.

        If none is ready, sample for a short while first; the answer may still be empty.

        Raises: EngineError: the engine failed.
        """

    def abort(self, names: Collection[str]) -> None:
        """Drop the requests with these names, whether they are being sampled or have ended."""

    def leave(self) -> None:
        """Say that the caller has no open request and makes none for now.

        A shared engine waits until all of its ranks have said so.
        """

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, (name, tensor) pairs, and forget what was computed with the old ones.

        Open requests go on with the new weights.
        """

    def sleep(self) -> None:
        """Free device memory until the next `submit` or `load`."""

    def close(self) -> None: ...


def generate_all(engine: Engine, requests: Sequence[Request]) -> list[Generated]:
    """Sample a response to each request, and return the responses in the requests' order.

    Raises: EngineError: a request failed; all of them are dropped.
    """
    batch = f"batch {secrets.token_hex(8)}"
    requests_by_name = {f"{batch}, {place}": request for place, request in enumerate(requests)}
    open_names, results = set(requests_by_name), dict[str, Generated]()
    try:
        engine.submit(requests_by_name)
        while open_names:
            new_results = engine.results(open_names)
            results.update(new_results)
            open_names.difference_update(new_results)
    except BaseException:
        with suppress(Exception):  # the first error is the one to report
            engine.abort(open_names)
        raise
    engine.leave()
    return [results[name] for name in requests_by_name]


class SteppedEngine(ABC):
    """The base of engines that sample in steps: an `Engine` except for what subclasses implement.

    Several callers may have open requests, also in several threads. A step that one caller makes
    samples for all, and each caller takes its own results.
    """

    is_shared = False

    def __init__(self) -> None:
        self._results: dict[str, Generated] = {}
        self._in_use = threading.RLock()
        self._next = threading.Lock()  # held by the thread that may use the engine next

    @abstractmethod
    def _begin(self, requests: Mapping[str, Request]) -> None:
        """Start requests, which are given by their names."""

    @abstractmethod
    def _step(self) -> Mapping[str, Generated]:
        """Sample for a short while, and return the new results by the names of their requests."""

    @abstractmethod
    def _drop(self, names: Collection[str]) -> None:
        """Drop the requests with these names, which have no result yet."""

    def submit(self, requests: Mapping[str, Request]) -> None:
        with self._exclusive_use():
            self._begin(requests)

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        with self._exclusive_use():
            if not any(name in names for name in self._results):
                self._results.update(self._step())
            ready = [name for name in self._results if name in names]
            return {name: self._results.pop(name) for name in ready}

    def abort(self, names: Collection[str]) -> None:
        with self._exclusive_use():
            self._drop([name for name in names if self._results.pop(name, None) is None])

    @contextmanager
    def _exclusive_use(self) -> Iterator[None]:
        """Let no other thread use the engine inside the block.

        A thread that waits for this comes before the thread that makes one step after the other.
        """
        with self._next:
            self._in_use.acquire()
        try:
            yield
        finally:
            self._in_use.release()

    def leave(self) -> None:
        return  # no other rank waits for its steps


@dataclass
class _RankNews:
    """What a rank of a `TensorParallelEngine` tells the others before a step.

    These are its new requests, the names of requests to drop, and whether it `leaves`, because it
    has no open request.
    """

    requests: dict[str, Request] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    leaves: bool = False


class TensorParallelEngine:
    """An `Engine` that spreads one model over the ranks of a group; each rank has its own requests.

    All ranks of the group must call each method. Each rank has a part of the model, an `Engine`,
    and all parts make each step together. Before a step the ranks tell each other their new
    requests, and each part runs the requests of the whole group. The requests' seeds make every
    part draw the same tokens. A rank returns the responses to its own requests, and goes on
    stepping until all ranks of the group leave.
    """

    is_shared = True

    def __init__(self, part: Engine, num_parts: int) -> None:
        """Join this rank's `part` with those of its group, which has `num_parts` ranks.

        Every rank must call this at the same time.
        """
        self._part, self.max_tokens = part, part.max_tokens
        for first in range(0, dist.get_world_size(), num_parts):
            ranks = range(first, first + num_parts)
            group = dist.new_group(list(ranks))  # every rank takes part in making each group
            if dist.get_rank() in ranks:
                self._group, self._place = group, dist.get_rank() - first
        self._num_parts = num_parts
        self._news = _RankNews()
        self._under_way: set[str] = set()  # by all ranks; a name begins with its rank's place

    @property
    def has_weights(self) -> bool:
        return self._part.has_weights

    def submit(self, requests: Mapping[str, Request]) -> None:
        """Keep new requests, given by their names, until the group's next step starts them."""
        self._news.requests |= requests

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        """Make a step with the whole group, and return this rank's results of it by name.

        Every rank of the group must call this, even without an open request.
        """
        self._exchange()
        if not self._under_way:
            return {}
        results = self._part.results(self._under_way)
        self._under_way -= results.keys()
        prefix = f"{self._place}: "
        return {
            name.removeprefix(prefix): generated
            for name, generated in results.items()
            if name.startswith(prefix)
        }

    def abort(self, names: Collection[str]) -> None:
        """Keep the names of requests until the group's next step drops these."""
        self._news.dropped.extend(names)

    def leave(self) -> None:
        """Make the group's steps until no rank of the group has an open request."""
        self._news.leaves = True
        while not self._exchange():
            if self._under_way:
                self._under_way -= self._part.results(self._under_way).keys()
            self._news.leaves = True

    def _exchange(self) -> bool:
        """Exchange new and dropped requests with the group's ranks, and tell them to this part.

        Returns: whether no rank of the group has an open request.
        """
        news_by_rank = [_RankNews() for _ in range(self._num_parts)]
        dist.all_gather_object(news_by_rank, self._news, group=self._group)
        self._news = _RankNews()
        for place, news in enumerate(news_by_rank):
            dropped = {f"{place}: {name}" for name in news.dropped} & self._under_way
            if dropped:
                self._part.abort(dropped)
                self._under_way -= dropped
            new_requests = {f"{place}: {name}": request for name, request in news.requests.items()}
            if new_requests:
                self._part.submit(new_requests)
                self._under_way |= new_requests.keys()
        return all(news.leaves for news in news_by_rank)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Give new weights to this rank's part, which takes its share of each whole tensor."""
        self._part.load(weights)

    def sleep(self) -> None:
        self._part.sleep()

    def close(self) -> None:
        self._part.close()
