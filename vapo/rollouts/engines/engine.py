"""What the sampler needs of a vLLM engine, wherever it runs."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
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
        ...

    @property
    def has_weights(self) -> bool:
        """Whether weights were loaded and have not been discarded since."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether several ranks are one engine: each calls `results` as often as the others, until
        all of them have nothing under way (`leave`)."""
        ...

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

    def leave(self) -> None:
        """The caller has nothing under way any more, and no other request to make."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights and forget what was computed with the old ones.

        It may come while requests are under way: they go on with the new weights.
        """
        ...

    def sleep(self) -> None:
        """Free device memory until the next `submit` or `load`."""
        ...

    def close(self) -> None: ...


def sampled(
    engine: Engine,
    requests: Sequence[Request],
    settings: SamplingSettings,
    *,
    end_ids: frozenset[int],
) -> list[Generated]:
    """Sample all of these, in the requests' order; fails as a whole with an `EngineError`."""
    batch = f"batch {secrets.token_hex(8)}"
    named = {f"{batch}, {place}": request for place, request in enumerate(requests)}
    left, found = set(named), dict[str, Generated]()
    try:
        engine.submit(named, settings, end_ids=end_ids)
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
