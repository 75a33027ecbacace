"""Sampling from the live Hugging Face policy.

The engine holds the actor's own module, so there are no weights to copy. Whole responses are
sampled as the first turns of a stream (`turns.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.networks.saved_tokenizers import end_token_ids
from vapo.rollouts.engines.contract import SamplingSettings, TurnRequest
from vapo.rollouts.engines.responses import (
    check_lengths,
    draw_seed,
    make_rollouts,
    requested_responses,
    turn_name,
)
from vapo.rollouts.engines.transformers.decoding_attention import decoding_attention
from vapo.rollouts.engines.transformers.turns import TransformersTurns
from vapo.types import Prompt, Rollout


class TransformersSampler:
    """The `Sampler` that decodes with the actor's own module.

    `rollout_logprobs` are under the distribution sampled from: after temperature, top-k and
    top-p. With `greedy` the likeliest token is taken, and its log-prob is under that same
    distribution. A response stops at the tokenizer's end token, or one that the model's
    generation config names. `gather` is entered around the decoding; it holds the full weights of
    a sharded module on every rank, so that ranks may decode different lengths.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_concurrent_sequences: int,
        device: torch.device | str,
        gather: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if max_concurrent_sequences < 1:
            raise ValueError("max_concurrent_sequences must be at least 1")
        self._model = model
        self._tokenizer = tokenizer
        self._max_rows = max_concurrent_sequences
        self._device = torch.device(device)
        self._gather = gather
        self._stop_ids = end_token_ids(model.generation_config, tokenizer)
        self._weights_in_use = threading.Lock()
        self._next = threading.Lock()  # who has it is next to use or to change the weights

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a response, or a turn."""
        return self._stop_ids

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
            UserError: a prompt is empty, or prompt and budget exceed the model's positions.
            NonFiniteLogitsError: the policy gives no distribution to sample from.
        """
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        check_lengths(prompts, settings.max_response_tokens, positions)
        if not prompts:
            return []
        responses = {r.key: r for r in requested_responses(prompts, group_size)}
        most = settings.max_response_tokens

        def name(request: TurnRequest) -> str:
            return prompts[request.key[0]].prompt_id

        with self._stream(settings, seed, name) as stream:
            # Longest prompts first: neighbours in the queue need little padding, and rows that
            # tend to take longest do not start last. The sort is stable: groups stay together.
            for r in sorted(responses.values(), key=lambda r: -len(r.prompt.prompt_ids)):
                stream.submit(TurnRequest(r.key, 0, r.prompt.prompt_ids, r.prompt.budget(most)))
            while stream.num_open:
                ended = stream.step()
                for turn in ended:
                    stream.forget(turn.request.key)
                    responses[turn.request.key].ids.extend(turn.ids)
                    responses[turn.request.key].logprobs.extend(turn.logprobs)
                if ended:
                    advance(len(ended))
        return make_rollouts(list(responses.values()), self._tokenizer, self._stop_ids)

    def turns(
        self, settings: SamplingSettings, *, seed: int
    ) -> AbstractContextManager[TransformersTurns]:
        """See `TurnSampler.turns`; steps must be in the thread that entered it."""
        return self._stream(settings, seed, turn_name)

    @contextmanager
    def _stream(
        self, settings: SamplingSettings, seed: int, name: Callable[[TurnRequest], str]
    ) -> Iterator[TransformersTurns]:
        # no_grad, not inference_mode: what a forward keeps inside the module (rotary tables)
        # must stay usable in the trainer's autograd.
        with (
            self._gather(),
            self._computing(),
            _eval_mode(self._model),
            decoding_attention(self._model, self._device),
            torch.no_grad(),
        ):
            yield TransformersTurns(
                self._model,
                settings,
                draw_seed=lambda request: draw_seed(seed, request),
                stop_ids=self._stop_ids,
                max_rows=self._max_rows,
                device=self._device,
                take_turns=self._stepping,
                name=name,
            )

    def _computing(self) -> AbstractContextManager[object]:
        """The precision in which the module computes: that of its weights."""
        return nullcontext()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Around each step of a stream. A sync that waits for the step's end is before the next."""
        with self._next:
            pass
        with self._weights_in_use:
            yield

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing to do: the engine decodes with the actor's own parameters.

        `weights` is not iterated over, so that gathering them from shards costs nothing.
        """

    def sleep(self) -> None:
        """Nothing to free: the engine has no memory of its own between calls."""

    def close(self) -> None:
        """Nothing to free: the module belongs to the trainer."""


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
