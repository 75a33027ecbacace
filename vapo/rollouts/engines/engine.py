"""What the sampler needs of a vLLM engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from vapo.errors import UserError
from vapo.rollouts.engines.contract import SamplingSettings

RESUME_HINT = "the last checkpoint is intact: resume from it with `--ckpt_path last`"


class EngineError(UserError):
    """The engine died, hangs, has too little memory, or has not taken the weights."""


@dataclass(frozen=True)
class Request:
    """One response to sample. Equal requests give equal responses, whatever else is sampled.

    Requests with the same `episode` are turns of one: the engine may keep what it computed for
    one until the next.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int | None = None
    episode: str | None = None

    def budget(self, settings: SamplingSettings) -> int:
        """How many tokens may be sampled; `max_tokens` None, or more than the settings': theirs."""
        most = settings.max_response_tokens
        return most if self.max_tokens is None else min(self.max_tokens, most)


@dataclass(frozen=True)
class Generated:
    """The sampled tokens, an end token included, each with its log-prob."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Engine(Protocol):
    """Weights and KV cache of a model, and the loop that samples from it."""

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of prompt and response together."""
        ...

    @property
    def has_weights(self) -> bool:
        """Whether weights were loaded and have not been discarded since."""
        ...

    def generate(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        end_ids: frozenset[int],
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Generated]:
        """Sample all responses, in the requests' order; fails as a whole with an `EngineError`."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights and forget what was computed with the old ones."""
        ...

    def sleep(self) -> None:
        """Free device memory until the next `generate` or `load`."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class StreamEngine(Engine, Protocol):
    """An engine that takes requests at any time and samples them together.

    `load` may come while requests are under way: they go on with the new weights.
    """

    def submit(
        self,
        requests: Mapping[str, Request],
        settings: SamplingSettings,
        *,
        end_ids: frozenset[int],
    ) -> None:
        """Begin requests. Their names are the caller's, of which no other is under way."""
        ...

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        """Take results of these requests; sample on for a short while if none is ready.

        Raises: EngineError
        """
        ...

    def abort(self, names: Collection[str]) -> None:
        """Drop requests, whether or not they are under way."""
        ...
