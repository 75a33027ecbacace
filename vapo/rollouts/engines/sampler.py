"""The `Sampler` over an engine with weights of its own, which are pushed and checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.errors import UserError
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Engine, Request, StreamEngine
from vapo.rollouts.engines.engine_turns import EngineTurns
from vapo.rollouts.engines.responses import (
    NonFiniteLogitsError,
    check_lengths,
    make_rollouts,
    requested_responses,
)
from vapo.rollouts.engines.sync_check import SyncCheck, WeightSums
from vapo.system.seeding import derive_seed
from vapo.types import Prompt, Rollout

Weights = Callable[[], Iterable[tuple[str, Tensor]]]


class EngineSampler:
    """The `Sampler` that samples with vLLM, or on rollout servers.

    `rollout_logprobs` are the engine's own, under the distribution sampled from: after
    temperature, top-k and top-p. With `greedy` vLLM's are under the plain distribution: it applies
    none of the three then. The engine starts empty; `weights` gives the actor's, at the start and
    when the engine has discarded its own in its sleep.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: frozenset[int],
        weights: Weights,
        dtype: torch.dtype,
        check: SyncCheck,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._weights = weights
        self._dtype = dtype
        self._check = check

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Rollout]:
        """See `Sampler.sample`.

        Raises:
            UserError: a prompt is empty, or prompt and budget exceed the engine's tokens.
            EngineError: the engine failed; there is no partial result.
            NonFiniteLogitsError: the policy gives no distribution to sample from.
        """
        check_lengths(prompts, settings.max_response_tokens, self._engine.max_tokens)
        if not self._engine.has_weights:
            self.sync(self._weights())
        responses = requested_responses(prompts, group_size)
        generated = self._engine.generate(
            [
                Request(
                    response.prompt.prompt_ids,
                    derive_seed(seed, "response", *response.key),
                    response.prompt.max_response_tokens,
                )
                for response in responses
            ],
            settings,
            end_ids=self._end_ids,
            advance=advance,
        )
        for response, tokens in zip(responses, generated, strict=True):
            if not all(map(math.isfinite, tokens.logprobs)):
                raise NonFiniteLogitsError(response.prompt.prompt_id)
            response.ids.extend(tokens.ids)
            response.logprobs.extend(tokens.logprobs)
        return make_rollouts(responses, self._tokenizer, self._end_ids)

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a response, or a turn."""
        return self._end_ids

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[EngineTurns]:
        """See `TurnSampler.turns`.

        Raises:
            UserError: the engine's parts must sample in step.
        """
        if not isinstance(self._engine, StreamEngine):
            raise UserError(
                "episodes need an engine whose processes do not sample in step: set "
                "rollouts.vllm.tensor_parallel_size=1, or rollouts.engine=servers"
            )
        if not self._engine.has_weights:
            self.sync(self._weights())
        stream = EngineTurns(self._engine, settings, seed=seed, end_ids=self._end_ids)
        try:
            yield stream
        finally:
            stream.close()

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
