"""Turns of episodes as requests to an engine."""

from __future__ import annotations

import math
import secrets

from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.rollouts.engines.engine import Engine, Request
from vapo.rollouts.engines.turn_requests import (
    NonFiniteLogitsError,
    check_turn,
    draw_seed,
    turn_name,
)


class EngineTurns:
    """See `TurnStream`. What is kept of ended turns is the engine's to decide."""

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
        """See `TurnStream.num_open`."""
        return len(self._open)

    def submit(self, request: TurnRequest) -> None:
        """See `TurnStream.submit`.

        Raises:
            UserError: there are no tokens before the turn, or with it more than the engine's.
        """
        check_turn(request, self._engine.max_tokens)
        if request.key in self._names:
            raise ValueError(f"a turn of episode {request.key} is open already")
        i, j = request.key
        name = f"{self._name}, {i}, {j}, {request.turn}"
        self._waiting[name] = Request(
            request.ids,
            draw_seed(self._seed, request),
            request.max_tokens,
            episode=f"{self._name}, {i}, {j}",
        )
        self._open[name], self._names[request.key] = request, name

    def step(self) -> list[SampledTurn]:
        """See `TurnStream.step`.

        Raises:
            EngineError: the engine failed.
            NonFiniteLogitsError: the policy gives no distribution to sample from.
        """
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._engine.submit(waiting, self._settings, end_ids=self._end_ids)
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
        """See `TurnStream.forget`."""
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
