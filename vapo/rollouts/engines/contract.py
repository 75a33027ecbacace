"""The sampler's contract: prompts in, responses with their log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vapo.config.schema import RolloutConfig
from vapo.types import Prompt, Rollout


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample. `top_k` 0 keeps all tokens; `top_p` 1 keeps all mass.

    `greedy` takes the likeliest token instead of drawing one.
    """

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


def sampling_settings(config: RolloutConfig) -> SamplingSettings:
    """The sampling settings of training rollouts."""
    return SamplingSettings(
        max_response_tokens=config.max_response_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )


class Sampler(Protocol):
    """An engine that samples responses from the current policy."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Rollout]:
        """Sample `group_size` responses to each prompt; groups contiguous, in the prompts' order.

        The response of (prompt i, sample j) depends on the weights, the prompt, `settings` and
        (seed, i, j) only, not on how rows are batched (up to floating point). `advance(n)` is
        called as n more responses finish. Every rank must call this: an engine may gather the
        actor's shards.
        """
        ...

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the actor's new weights, as (name, full tensor) pairs of its state dict."""
        ...

    def sleep(self) -> None:
        """Free memory until the next `sync` or `sample`; nothing to do for some engines."""
        ...

    def close(self) -> None:
        """Free the engine."""
        ...
