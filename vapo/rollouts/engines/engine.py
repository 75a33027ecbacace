"""What the sampler needs of a vLLM engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vapo.errors import UserError
from vapo.rollouts.engines.contract import SamplingSettings

RESUME_HINT = "the last checkpoint is intact: resume from it with `--ckpt_path last`"


class EngineError(UserError):
    """The engine died, hangs, has too little memory, or has not taken the weights."""


@dataclass(frozen=True)
class Request:
    """One response to sample. Equal requests give equal responses, whatever else is sampled."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int | None = None

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


class HeartbeatEngine(Engine, Protocol):
    """An engine whose progress can be followed token by token."""

    def generate(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        end_ids: frozenset[int],
        advance: Callable[[int], None] = lambda n: None,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> list[Generated]:
        """See `Engine.generate`; `heartbeat` is called at every step that sampled a token."""
        ...
