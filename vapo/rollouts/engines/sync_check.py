"""Check after every push that the engine has the new weights.

The engine continues two fixed prompts greedily, and the trainer scores what it wrote:

1. the mean gap of the log-probs must be within rounding: else weights are missing, went to wrong
   places, or are older than a cached prefix;
2. if the weights have changed since the last push, so must some log-prob of the probe, in any
   bit: else the push did not reach the engine, which a small update in bfloat16 would hide from
   the first test.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from vapo.rollouts.engines.contract import NonFiniteLogitsError, SamplingSettings
from vapo.rollouts.engines.engine import Engine, EngineError, Generated, Request, sampled

# Log-probs, at temperature 1, of the second of each pair's ids after the first: the trainer's.
Score = Callable[[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]], list[list[float]]]

_NUM_PROMPTS = 2
_NUM_TOKENS = 16
_PROMPT_TOKENS = 288  # over two blocks of the KV cache, so that a stale prefix would be found
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSums:
    """A checksum of every tensor's bits, in the engine's dtype: equal only for equal weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: list[Tensor] = []

    def of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the weights through and sum their bits."""
        for name, tensor in weights:
            cast = tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor
            bits = cast.contiguous().view(_INTEGERS[cast.element_size()])
            self._sums.append(bits.sum(dtype=torch.int64))
            yield name, tensor

    def result(self) -> tuple[int, ...]:
        return tuple(torch.stack(self._sums).tolist()) if self._sums else ()


class SyncCheck:
    """Compares the engine with the trainer after a push, and with itself before it."""

    def __init__(
        self,
        score: Score,
        *,
        vocab_size: int,
        max_tokens: int,
        max_logprob_gap: float,
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
        """Check the engine and return the mean gap. Every rank must call this.

        Raises:
            EngineError: the engine does not have the weights.
            NonFiniteLogitsError: the trainer's own log-probs are not finite.
        """
        written = sampled(engine, self._requests)
        scores = self._score(
            [(r.prompt_ids, g.ids) for r, g in zip(self._requests, written, strict=True)]
        )
        if not all(math.isfinite(score) for row in scores for score in row):
            raise NonFiniteLogitsError("of the sync's probe")
        gap = statistics.fmean(
            abs(mine - theirs)
            for generated, row in zip(written, scores, strict=True)
            for mine, theirs in zip(generated.logprobs, row, strict=True)
        )
        last, self._last = self._last, (sums, written)
        if not sums:
            raise EngineError("the engine took no weights: the sync was skipped")
        if not gap <= self._limit:
            raise EngineError(
                f"after a weight sync the engine's log-probs differ from the trainer's by "
                f"{gap:.3g} nats on average, more than max_logprob_gap {self._limit:g} (a key of "
                "rollouts.vllm and rollouts.servers): it does not have the trainer's weights (or "
                "rounds more; docs/rollouts.md)"
            )
        if last is not None and last[0] != sums and last[1] == written:
            raise EngineError(
                "a weight sync did not reach the engine: the weights have changed, its "
                "log-probs have not, in any bit"
            )
        return gap
