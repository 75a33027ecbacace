"""The `Sampler` over a vLLM engine: the actor's weights are pushed to it, then checked."""

from __future__ import annotations

import math
import random
import secrets
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from vapo.rollouts.engines.engine import Engine, EngineError, Generated, Request, generate_all

# The trainer's log-probs, at temperature 1, of each (prompt, response) pair's response tokens.
Score = Callable[[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]], list[list[float]]]
Conversion = Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]

_NUM_PROMPTS = 2
_NUM_TOKENS = 16
_PROMPT_TOKENS = 288  # over two blocks of the KV cache, so that a stale prefix shows
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EngineSampler:
    """The `Sampler` that samples with vLLM, in this process or on servers.

    `rollout_logprobs` are the engine's log-probs under the distribution that it samples from, after
    temperature, top-k and top-p. With `greedy` vLLM applies none of the three, and they are under
    the plain distribution. The engine starts without weights, and may discard its weights while it
    sleeps: then those that `weights` returns are pushed before it samples. `convert` gives weights
    the dtypes and names that the engine takes. `check` makes sure after each push that the engine
    has them.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        end_ids: frozenset[int],
        weights: Weights,
        convert: Conversion,
        check: SyncCheck,
    ) -> None:
        self.end_ids = end_ids
        self._engine, self._weights = engine, weights
        self._convert, self._check = convert, check

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[EngineTurns]:
        if not self._engine.has_weights:
            self.sync(self._weights())
        stream = EngineTurns(self._engine, settings, seed=seed, end_ids=self.end_ids)
        try:
            yield stream
        finally:
            stream.drop()
        self._engine.leave()  # after an error no other rank waits for this one

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Push the actor's new weights to the engine, and check that they have arrived.

        Raises: EngineError: they have not.
        """
        sums = WeightSums()
        self._engine.load(sums.of(self._convert(weights)))
        self._check(self._engine, sums.result())

    def sleep(self) -> None:
        self._engine.sleep()

    def close(self) -> None:
        self._engine.close()


class EngineTurns:
    """The `TurnStream` that samples turns with a vLLM engine, which decides what it caches."""

    def __init__(
        self, engine: Engine, settings: SamplingSettings, *, seed: int, end_ids: frozenset[int]
    ) -> None:
        self._engine, self._settings, self._seed = engine, settings, seed
        self._end_ids = end_ids
        # A server may have requests of other processes, and of runs that have ended.
        self._name = f"stream {secrets.token_hex(8)}"
        self._waiting: dict[str, Request] = {}  # the next step submits them together
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
        ended_turns = []
        for name, tokens in self._engine.results(self._open.keys()).items():
            request = self._open.pop(name)
            del self._names[request.key]
            if not all(map(math.isfinite, tokens.logprobs)):
                raise NonFiniteLogitsError(turn_name(request))
            has_ended = tokens.ids[-1] in self._end_ids
            ended_turns.append(
                SampledTurn(request, tokens.ids, tokens.logprobs, has_ended, tokens.updates)
            )
        return ended_turns

    def forget(self, key: tuple[int, int]) -> None:
        name = self._names.pop(key, None)
        if name is not None:
            del self._open[name]
            if self._waiting.pop(name, None) is None:
                self._engine.abort([name])

    def drop(self) -> None:
        """Drop all open turns, here and in the engine."""
        if names := [name for name in self._open if name not in self._waiting]:
            self._engine.abort(names)
        self._waiting, self._open, self._names = {}, {}, {}


class CastWeights:
    """Casts weights to the dtype that the engine computes in, one tensor at a time.

    The engine would round them itself, but float32 weights are twice the bytes to send.

    Args:
        in_float32: parts of the names of weights that the architecture keeps in float32 whatever
            the dtype is, as transformers lists them. They are pushed as they are.
    """

    def __init__(self, dtype: torch.dtype, in_float32: Collection[str] = ()) -> None:
        self._dtype, self._in_float32 = dtype, in_float32

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            tensor = tensor.detach()
            stays = not tensor.is_floating_point() or any(p in name for p in self._in_float32)
            yield name, tensor if stays else tensor.to(self._dtype)


class WeightSums:
    """Adds up the bits of each tensor that is pushed, to show whether the weights have changed."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights unchanged, and add up the bits of each while it passes."""
        for name, tensor in weights:
            bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
            self._sums.append(bits.sum(dtype=torch.int64))
            yield name, tensor

    def result(self) -> tuple[int, ...]:
        return tuple(torch.stack(self._sums).tolist()) if self._sums else ()


class SyncCheck:
    """Checks after every push that the engine has the new weights.

    The engine continues two fixed prompts greedily, and the trainer computes the log-probs of the
    same tokens:

    1. the mean difference of the two log-probs must be within rounding: else weights are missing,
       were given to wrong layers, or are newer than a cached prefix;
    2. if the weights have changed since the last push, some log-prob must have changed, too, by a
       bit at least: else the push did not reach the engine. The first test cannot see this after a
       small update in bfloat16.
    """

    def __init__(
        self, score: Score, *, vocab_size: int, max_tokens: int, max_logprob_gap: float
    ) -> None:
        draw = random.Random(0)
        num_tokens = min(_NUM_TOKENS, max_tokens // 2)
        length = min(_PROMPT_TOKENS, max_tokens - num_tokens)
        settings = SamplingSettings(max_response_tokens=num_tokens, greedy=True)
        self._requests = [
            Request(tuple(draw.randrange(vocab_size) for _ in range(length)), 0, settings)
            for _ in range(_NUM_PROMPTS)
        ]
        self._score = score
        self._limit = max_logprob_gap
        self._last: tuple[tuple[int, ...], list[Generated]] | None = None

    def __call__(self, engine: Engine, sums: tuple[int, ...]) -> float:
        """Check that the engine has the pushed weights, whose `WeightSums` are `sums`.

        Return the mean difference of its log-probs from the trainer's. Every rank must call this.

        Raises:
            EngineError: the engine does not have the weights.
            NonFiniteLogitsError: the trainer's own log-probs are not finite.
        """
        continuations = generate_all(engine, self._requests)
        scores = self._score(
            [(r.prompt_ids, g.ids) for r, g in zip(self._requests, continuations, strict=True)]
        )
        if not all(math.isfinite(score) for row in scores for score in row):
            raise NonFiniteLogitsError("of the check after a sync")
        gap = statistics.fmean(
            abs(engine_logprob - trainer_logprob)
            for generated, row in zip(continuations, scores, strict=True)
            for engine_logprob, trainer_logprob in zip(generated.logprobs, row, strict=True)
        )
        last, self._last = self._last, (sums, continuations)
        if not sums:
            raise EngineError("the engine took no weights: the sync was skipped")
        if not gap <= self._limit:
            raise EngineError(
                f"after a weight sync the engine's log-probs differ from the trainer's by "
                f"{gap:.3g} nats on average, more than max_logprob_gap {self._limit:g} (a key of "
                "rollouts.vllm and rollouts.servers): it does not have the trainer's weights (or "
                "rounds more; docs/rollouts.md)"
            )
        if last is not None and last[0] != sums and last[1] == continuations:
            raise EngineError(
                "a weight sync did not reach the engine: the weights have changed, its "
                "log-probs have not, in any bit"
            )
        return gap
