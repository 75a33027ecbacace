"""The `Sampler` over an engine with weights of its own, which are pushed and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vapo.rollouts.engines.contract import SamplingSettings, Weights
from vapo.rollouts.engines.engine import Engine
from vapo.rollouts.engines.engine_turns import EngineTurns
from vapo.rollouts.engines.sync_check import SyncCheck, WeightSums


class EngineSampler:
    """The `Sampler` that samples with vLLM, in this process or on servers.

    `rollout_logprobs` are the engine's own, under the distribution sampled from: after
    temperature, top-k and top-p. With `greedy` vLLM's are under the plain distribution: it applies
    none of the three then. The engine starts empty; `weights` gives the actor's, at the start and
    when the engine has discarded its own in its sleep.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        end_ids: frozenset[int],
        weights: Weights,
        dtype: torch.dtype,
        check: SyncCheck,
    ) -> None:
        self._engine = engine
        self._end_ids = end_ids
        self._weights = weights
        self._dtype = dtype
        self._check = check

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a response, or a turn."""
        return self._end_ids

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[EngineTurns]:
        """See `Sampler.turns`."""
        if not self._engine.has_weights:
            self.sync(self._weights())
        stream = EngineTurns(self._engine, settings, seed=seed, end_ids=self._end_ids)
        try:
            yield stream
        finally:
            stream.drop()
        self._engine.leave()  # not after an error, for which no other rank waits

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Sampler.sync`.

        Raises:
            EngineError: the weights did not arrive.
        """
        sums = WeightSums(self._dtype)
        self._engine.load(sums.of(weights))
        self._check(self._engine, sums.result())

    def sleep(self) -> None:
        """See `Sampler.sleep`."""
        self._engine.sleep()

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()
