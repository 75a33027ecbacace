"""Sampling from the live Hugging Face policy: continuous batching over left-padded rows.

The engine holds the actor's own module, so there are no weights to copy. One loop:

    admit prompts (prefill) -> decode a token for every row -> ... -> drop finished rows, admit

A finished row keeps its place until a quarter of the rows have finished; then the live rows
are moved together and the free places are filled from the queue, so finished rows cost little.
Rows are right-aligned: the next token of every row goes into the same cache column.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from vapo.networks.saved_tokenizers import end_token_ids
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.responses import (
    NonFiniteLogitsError,
    Response,
    check_lengths,
    make_rollouts,
    requested_responses,
)
from vapo.rollouts.engines.transformers.decoding_rows import DecodingRows, join_rows
from vapo.rollouts.engines.transformers.token_sampling import (
    filtered_logprobs,
    inverse_cdf,
    uniform_draws,
)
from vapo.types import Prompt, Rollout

_FREE_FRACTION = 0.25
_PREFILL_TOKENS = 16_384  # padded prompt tokens of one prefill forward; bounds its activations


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
        responses = requested_responses(prompts, group_size)
        # no_grad, not inference_mode: what a forward keeps inside the module (rotary tables)
        # must stay usable in the trainer's autograd.
        with self._gather(), _eval_mode(self._model), torch.no_grad():
            _Decoding(self, responses, settings, seed, advance).run()
        return make_rollouts(responses, self._tokenizer, self._stop_ids)

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing to do: the engine decodes with the actor's own parameters.

        `weights` is not iterated over, so that gathering them from shards costs nothing.
        """

    def sleep(self) -> None:
        """Nothing to free: the engine has no memory of its own between calls."""

    def close(self) -> None:
        """Nothing to free: the module belongs to the trainer."""


class _Decoding:
    """One call of `sample`: the queue, and the rows that are being decoded."""

    def __init__(
        self,
        sampler: TransformersSampler,
        responses: list[Response],
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None],
    ) -> None:
        self.model = sampler._model
        self.device = sampler._device
        self.max_rows = sampler._max_rows
        self.stop_ids = torch.tensor(sorted(sampler._stop_ids), device=self.device)
        self.pad_id = min(sampler._stop_ids)  # any valid id: padding is masked
        self.responses = responses
        self.settings = settings
        self.seed = seed
        self.advance = advance
        # Longest prompts first: neighbours in the queue need little padding, and rows that
        # tend to take longest do not start last. The sort is stable: groups stay together.
        self.queue = deque(
            sorted(range(len(responses)), key=lambda r: -len(responses[r].prompt.prompt_ids))
        )

    def run(self) -> None:
        rows: DecodingRows | None = None
        while rows is not None or self.queue:
            if rows is None or len(rows) - rows.num_alive >= max(1, _FREE_FRACTION * len(rows)):
                rows = self.regroup(rows)
            else:
                self.extend(rows, rows.forward(self.model))

    def regroup(self, rows: DecodingRows | None) -> DecodingRows | None:
        """Write out what is new, drop finished rows, fill the free places from the queue."""
        parts = [] if rows is None else [rows]
        num_free = self.max_rows - (0 if rows is None else rows.num_alive)
        admitted = [self.queue.popleft() for _ in range(min(num_free, len(self.queue)))]
        parts.extend(self.prefill(chunk) for chunk in self.prefill_chunks(admitted))
        for part in parts:
            part.write_out(self.write)
        return join_rows(parts, max_tokens=self.settings.max_response_tokens)

    def write(self, request: int, ids: list[int], logprobs: list[float]) -> None:
        self.responses[request].ids.extend(ids)
        self.responses[request].logprobs.extend(logprobs)

    def extend(self, rows: DecodingRows, logits: Float[Tensor, "R V"]) -> None:
        """Sample every row's next token from its logits and record it."""
        settings = self.settings
        logprobs = filtered_logprobs(
            logits,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        ids = logprobs.argmax(-1) if settings.greedy else inverse_cdf(logprobs, rows.uniforms())
        num_before = rows.num_alive
        is_finite = rows.record(
            ids,
            logprobs.gather(1, ids[:, None]).squeeze(1),
            stop_ids=self.stop_ids,
        )
        if not is_finite:
            row = int(logprobs.isnan().any(dim=-1).nonzero()[0])
            raise NonFiniteLogitsError(self.responses[rows.requests[row]].prompt.prompt_id)
        if rows.num_alive < num_before:
            self.advance(num_before - rows.num_alive)

    # ---- admission ----------------------------------------------------------------------------

    def prefill_chunks(self, admitted: list[int]) -> Iterator[list[int]]:
        """Cut into pieces of a bounded number of padded prompt tokens, longest prompts first."""
        chunk: list[int] = []
        prompts: set[int] = set()
        for request in admitted:
            widest = self.responses[(chunk or [request])[0]].prompt
            prompts.add(self.responses[request].key[0])
            if chunk and len(prompts) * len(widest.prompt_ids) > _PREFILL_TOKENS:
                yield chunk
                chunk, prompts = [], {self.responses[request].key[0]}
            chunk.append(request)
        if chunk:
            yield chunk

    def prefill(self, requests: list[int]) -> DecodingRows:
        """Run each distinct prompt once, and sample the first token of each of its responses."""
        keys = [self.responses[request].key for request in requests]
        prompts = {self.responses[r].key[0]: self.responses[r].prompt.prompt_ids for r in requests}
        place = {i: row for row, i in enumerate(prompts)}
        lengths = torch.tensor([len(ids) for ids in prompts.values()])
        width = int(lengths.max())
        input_ids = torch.tensor(
            [[self.pad_id] * (width - len(ids)) + list(ids) for ids in prompts.values()]
        )
        mask = torch.arange(width) >= (width - lengths)[:, None]
        positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
        cache = DynamicCache(config=self.model.config)
        logits = self.model(
            input_ids=input_ids.to(self.device),
            attention_mask=None if bool(mask.all()) else mask.to(self.device),
            position_ids=positions.to(self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        cache_rows = torch.tensor([place[i] for i, _ in keys], device=self.device)
        most = self.settings.max_response_tokens
        budgets = [self.responses[request].prompt.budget(most) for request in requests]
        # One more draw than tokens: a finished row still takes one, unused.
        draws = uniform_draws(keys, seed=self.seed, num_tokens=most + 1)
        rows = DecodingRows(
            requests,
            cache=cache,
            cache_rows=cache_rows,
            cache_mask=None,
            width=width,
            prompt_lengths=lengths.to(self.device)[cache_rows],
            draws=draws.to(self.device),
            budgets=torch.tensor(budgets, device=self.device),
            counts=torch.zeros_like(cache_rows),
            last_ids=torch.zeros_like(cache_rows),
        )
        self.extend(rows, logits[cache_rows])
        return rows


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
