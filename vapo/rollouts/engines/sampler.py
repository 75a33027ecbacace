"""The `Sampler` over an engine with weights of its own, which are pushed and checked."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vapo.rollouts.engines.contract import (
    NonFiniteLogitsError,
    SampledTurn,
    SamplingSettings,
    TurnRequest,
    Weights,
    check_turn,
    draw_seed,
    turn_name,
)
from vapo.rollouts.engines.engine import Engine, Request
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
        self.end_ids = end_ids
        self._engine, self._weights = engine, weights
        self._dtype, self._check = dtype, check

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[EngineTurns]:
        if not self._engine.has_weights:
            self.sync(self._weights())
        stream = EngineTurns(self._engine, settings, seed=seed, end_ids=self.end_ids)
        try:
            yield stream
        finally:
            stream.drop()
        self._engine.leave()  # not after an error, for which no other rank waits

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Sampler.sync`. Raises: EngineError: the weights did not arrive."""
        sums = WeightSums(self._dtype)
        self._engine.load(sums.of(weights))
        self._check(self._engine, sums.result())

    def sleep(self) -> None:
        self._engine.sleep()

    def close(self) -> None:
        self._engine.close()


class EngineTurns:
    """A `TurnStream` of requests to an engine, which decides what it keeps of ended turns."""

    def __init__(
        self,
        engine: Engine,
        settings: SamplingSettings,
        *,
        seed: int,
        end_ids: frozenset[int],
    ) -> None:
        self._engine, self._settings, self._seed = engine, settings, seed
        self._end_ids = end_ids
        # A server has streams of several processes, and of runs that have ended.
        self._name = f"stream {secrets.token_hex(8)}"
        self._waiting: dict[str, Request] = {}  # handed over together, by the next step
        self._open: dict[str, TurnRequest] = {}
        self._names: dict[tuple[int, int], str] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, request: TurnRequest) -> None:
        check_turn(request, self._engine.max_tokens)
        if request.key in self._names:
            raise ValueError(f"a turn of episode {request.key} is open already")
        episode = "{}, {}, {}".format(self._name, *request.key)
        name = f"{episode}, {request.turn}"
        self._waiting[name] = Request(
            request.ids,
            draw_seed(self._seed, request),
            self._settings,
            self._end_ids,
            request.max_tokens,
            episode,
        )
        self._open[name], self._names[request.key] = request, name

    def step(self) -> list[SampledTurn]:
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._engine.submit(waiting)
        if not self._open and not self._engine.is_shared:
            return []
        ended = []
        for name, tokens in self._engine.results(self._open.keys()).items():
            request = self._open.pop(name)
            del self._names[request.key]
            if not all(map(math.isfinite, tokens.logprobs)):
                raise NonFiniteLogitsError(turn_name(request))
            has_ended = tokens.ids[-1] in self._end_ids
            ended.append(
                SampledTurn(request, tokens.ids, tokens.logprobs, has_ended, tokens.updates)
            )
        return ended

    def forget(self, key: tuple[int, int]) -> None:
        name = self._names.pop(key, None)
        if name is not None:
            del self._open[name]
            if self._waiting.pop(name, None) is None:
                self._engine.abort([name])

    def drop(self) -> None:
        """Drop every open turn."""
        if names := [name for name in self._open if name not in self._waiting]:
            self._engine.abort(names)
        self._waiting, self._open, self._names = {}, {}, {}
