"""Sampling from the live Hugging Face policy.

The engine holds the actor's own module, so there are no weights to copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.networks.saved_tokenizers import end_token_ids
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers.decoding_attention import decoding_attention
from vapo.rollouts.engines.transformers.turns import TransformersTurns
from vapo.rollouts.engines.turn_requests import draw_seed


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

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[TransformersTurns]:
        """See `Sampler.turns`; steps must be in the thread that entered it."""
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
