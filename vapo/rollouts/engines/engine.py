"""What the sampler needs of a vLLM engine, wherever it runs; what engines share, ranks as one."""

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

    It ends with one of `end_ids`, or when its tokens are used up: `max_tokens`, or the settings' if
    those are fewer. Requests with the same `episode` are turns of one: the engine may keep what it
    computed for one until the next.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    settings: SamplingSettings
    end_ids: frozenset[int] = frozenset()
    max_tokens: int | None = None
    episode: str | None = None

    @property
    def budget(self) -> int:
        """How many tokens may be sampled."""
        most = self.settings.max_response_tokens
        return most if self.max_tokens is None else min(self.max_tokens, most)

    def parameters(self) -> dict[str, Any]:
        """It as vLLM's sampling parameters."""
        settings, greedy = self.settings, self.settings.greedy
        return {
            "max_tokens": self.budget,
            "temperature": 0.0 if greedy else settings.temperature,
            "top_p": 1.0 if greedy else settings.top_p,
            "top_k": 0 if greedy else settings.top_k,
            "seed": self.seed,  # without one vLLM draws it from the process-wide generator
            "stop_token_ids": sorted(self.end_ids),
            "ignore_eos": True,  # the end tokens are those named above, no others
            "logprobs": 0,  # the sampled token's own
            "detokenize": False,
        }


@dataclass(frozen=True)
class Generated:
    """The sampled tokens, an end token included, each with its log-prob.

    `updates` says which weights sampled them: (weight updates since the request was made, number
    of tokens), in order; without them all tokens are of the weights that there were then.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    updates: tuple[tuple[int, int], ...] = ()


class Engine(Protocol):
    """Weights and KV cache of a model; takes requests at any time and samples them together."""

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of prompt and response together."""

    @property
    def has_weights(self) -> bool:
        """Whether weights were loaded and have not been discarded since."""

    @property
    def is_shared(self) -> bool:
        """Whether several ranks are one engine: each calls `results` as often as the others, until
        all of them have nothing under way (`leave`)."""

    def submit(self, requests: Mapping[str, Request]) -> None:
        """Begin requests. Their names are the caller's, of which no other is under way."""

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        """Take results of these requests; sample on for a short while if none is ready.

        Raises: EngineError
        """

    def abort(self, names: Collection[str]) -> None:
        """Drop requests, whether or not they are under way."""

    def leave(self) -> None:
        """The caller has nothing under way any more, and no other request to make."""

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights and forget what was computed with the old ones.

        It may come while requests are under way: they go on with the new weights.
        """

    def sleep(self) -> None:
        """Free device memory until the next `submit` or `load`."""

    def close(self) -> None: ...


def sampled(engine: Engine, requests: Sequence[Request]) -> list[Generated]:
    """Sample all of these, in the requests' order; fails as a whole with an `EngineError`."""
    batch = f"batch {secrets.token_hex(8)}"
    named = {f"{batch}, {place}": request for place, request in enumerate(requests)}
    left, found = set(named), dict[str, Generated]()
    try:
        engine.submit(named)
        while left:
            done = engine.results(left)
            found.update(done)
            left.difference_update(done)
    except BaseException:
        with suppress(Exception):  # the first error is the one to report
            engine.abort(left)
        raise
    engine.leave()
    return [found[name] for name in named]


class SteppedEngine(ABC):
    """The `Engine` over an engine's own steps: requests at any time, results as they come.

    Several callers may have requests under way, also in several threads: a step that one of them
    makes samples for all, and each takes its own results.
    """

    is_shared = False

    def __init__(self) -> None:
        self._results: dict[str, Generated] = {}
        self._in_use = threading.RLock()
        self._next = threading.Lock()  # who has it is next to use the engine

    @abstractmethod
    def _begin(self, requests: Mapping[str, Request]) -> None:
        """Take in requests, by name."""

    @abstractmethod
    def _step(self) -> Mapping[str, Generated]:
        """Sample on for a short while; the results that are new."""

    @abstractmethod
    def _drop(self, names: Collection[str]) -> None:
        """Forget requests that may be under way."""

    def submit(self, requests: Mapping[str, Request]) -> None:
        with self._turn():
            self._begin(requests)

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        with self._turn():
            if not any(name in names for name in self._results):
                self._results.update(self._step())
            ready = [name for name in self._results if name in names]
            return {name: self._results.pop(name) for name in ready}

    def abort(self, names: Collection[str]) -> None:
        with self._turn():
            self._drop([name for name in names if self._results.pop(name, None) is None])

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Around each use of the engine: a thread that waits is before the one that steps on."""
        with self._next:
            self._in_use.acquire()
        try:
            yield
        finally:
            self._in_use.release()

    def leave(self) -> None:
        return  # nobody else waits for its steps


@dataclass
class _Asked:
    """What a rank asks of its group before a step; `leaves`: it has nothing under way."""

    requests: dict[str, Request] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    leaves: bool = False


class TensorParallelEngine:
    """See `Engine`, with every rank's own requests; all ranks of the group must call each method.

    The parts sample in step: before each step the ranks tell each other what is new, and each part
    runs all requests of its group, whose seeds make every part draw the same tokens. A rank keeps
    the responses to its own, and goes on stepping until all of the group leave.
    """

    is_shared = True

    def __init__(self, part: Engine, num_parts: int) -> None:
        """Every rank must call this at the same time, with a part of its own."""
        self._part, self.max_tokens = part, part.max_tokens
        for first in range(0, dist.get_world_size(), num_parts):
            ranks = range(first, first + num_parts)
            group = dist.new_group(list(ranks))  # every rank takes part in making each group
            if dist.get_rank() in ranks:
                self._group, self._place = group, dist.get_rank() - first
        self._num_parts = num_parts
        self._asked = _Asked()
        self._under_way: set[str] = set()  # of all ranks, each name with its rank's place

    @property
    def has_weights(self) -> bool:
        return self._part.has_weights

    def submit(self, requests: Mapping[str, Request]) -> None:
        """See `Engine.submit`; the next step takes them."""
        self._asked.requests |= requests

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        """See `Engine.results`: one step of the group, whatever is under way here."""
        self._exchange()
        if not self._under_way:
            return {}
        found = self._part.results(self._under_way)
        self._under_way -= found.keys()
        own = f"{self._place}: "
        return {n.removeprefix(own): made for n, made in found.items() if n.startswith(own)}

    def abort(self, names: Collection[str]) -> None:
        """See `Engine.abort`; the next step drops them."""
        self._asked.dropped.extend(names)

    def leave(self) -> None:
        """See `Engine.leave`: steps on as long as another rank of the group needs it."""
        self._asked.leaves = True
        while not self._exchange():
            if self._under_way:
                self._under_way -= self._part.results(self._under_way).keys()
            self._asked.leaves = True

    def _exchange(self) -> bool:
        """Tell the group what is new here and hear what is elsewhere; True if all leave."""
        of_ranks = [_Asked() for _ in range(self._num_parts)]
        dist.all_gather_object(of_ranks, self._asked, group=self._group)
        self._asked = _Asked()
        for place, asked in enumerate(of_ranks):
            dropped = {f"{place}: {name}" for name in asked.dropped} & self._under_way
            if dropped:
                self._part.abort(dropped)
                self._under_way -= dropped
            if named := {f"{place}: {name}": one for name, one in asked.requests.items()}:
                self._part.submit(named)
                self._under_way |= named.keys()
        return all(asked.leaves for asked in of_ranks)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load`: whole tensors, of which each part takes its own."""
        self._part.load(weights)

    def sleep(self) -> None:
        self._part.sleep()

    def close(self) -> None:
        self._part.close()
