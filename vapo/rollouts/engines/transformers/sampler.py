"""Sampling from the live Hugging Face policy: the sampler, and its stream of turns.

The engine holds the actor's own module, so there are no weights to copy. One loop, of which `step`
runs a few rounds:

    admit turns (prefill) -> decode a token for every row -> ... -> drop finished rows, admit

A finished row keeps its place until a quarter of the rows have finished; then the live rows
are moved together and the free places are filled from the queue, so finished rows cost little.
Rows are right-aligned: the next token of every row goes into the same cache column.

The cache of a turn that ended is kept for the next turn of its episode, which then prefills its
new tokens only. A recurrent layer has one state for each row, that of the last token, and padding
before the first token would change it. So prompts of equal length are prefilled together, and no
cache is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.networks.recurrent_layers import has_recurrent_layers
from vapo.networks.saved_tokenizers import end_token_ids
from vapo.rollouts.engines.contract import (
    SampledTurn,
    SamplingSettings,
    TurnRequest,
    check_turn,
    draw_seed,
)
from vapo.rollouts.engines.transformers.decoding_rows import (
    DecodingRows,
    OpenTurn,
    join_rows,
    prefill,
    prefill_chunks,
)
from vapo.rollouts.engines.transformers.kv_cache import CachedRow, decoding_attention
from vapo.rollouts.engines.transformers.token_sampling import (
    float32_logits,
    sample_tokens,
    uniform_draws,
)

_FREE_FRACTION = 0.25
_STEP_FORWARDS = 8


class TransformersSampler:
    """The `Sampler` that decodes with the actor's own module.

    `rollout_logprobs` are under the distribution sampled from: after temperature, top-k and
    top-p. With `greedy` the likeliest token is taken, and its log-prob is under that same
    distribution. A response stops at the tokenizer's end token, or one that the model's
    generation config names. `gather` is entered around the decoding; it holds the full weights of
    a sharded module on every rank, so that ranks may decode different lengths. `rounds` says
    whether products round their inputs, as the actor's do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_concurrent_sequences: int,
        device: torch.device | str,
        gather: Callable[[], AbstractContextManager[None]] = nullcontext,
        rounds: bool = False,
    ) -> None:
        if max_concurrent_sequences < 1:
            raise ValueError("max_concurrent_sequences must be at least 1")
        self.end_ids = end_token_ids(model.generation_config, tokenizer)
        self._model, self._device = model, torch.device(device)
        self._max_rows = max_concurrent_sequences
        self._gather = gather
        self._rounds = rounds
        self._is_recurrent = has_recurrent_layers(model.config)
        self._weights_in_use = threading.Lock()
        self._next = threading.Lock()  # held by the thread that may use or change the weights next

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[TransformersTurns]:
        """Yield a stream that samples turns; its steps must be in the thread that entered this.

        Every rank must enter and leave the context, as it may gather the actor's shards.
        """
        # no_grad, not inference_mode: what a forward keeps inside the module (rotary tables)
        # must stay usable in the trainer's autograd.
        was_training = self._model.training
        with (
            self._gather(),
            self._computing(),
            decoding_attention(self._model),
            torch.no_grad(),
        ):
            self._model.eval()
            try:
                yield TransformersTurns(
                    self._model,
                    settings,
                    seed=seed,
                    stop_ids=self.end_ids,
                    max_rows=self._max_rows,
                    device=self._device,
                    take_turns=self._stepping,
                    is_recurrent=self._is_recurrent,
                )
            finally:
                self._model.train(was_training)

    def _computing(self) -> AbstractContextManager[object]:
        """Return a context in which the module computes in the dtype of its weights.

        A subclass may choose another precision.
        """
        return nullcontext()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Let no sync change the weights inside the block, which is one step of a stream.

        A sync that waits comes before the next step.
        """
        with self._next:
            pass
        with self._weights_in_use, float32_logits(self._model, rounds=self._rounds):
            yield

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Do nothing: the engine decodes with the actor's own parameters.

        `weights` is not iterated over, so that gathering them from shards costs nothing.
        """

    def sleep(self) -> None:
        """Do nothing: the engine has no memory of its own between calls."""

    def close(self) -> None:
        """Do nothing: the module belongs to the trainer."""


class TransformersTurns:
    """Samples turns with a model of Transformers, several at once (a `TurnStream`).

    At most `max_rows` turns are decoded together. The caches of the newest `max_rows` ended turns
    are kept, or none if the model `is_recurrent`. Each step runs inside `take_turns`, and weights
    may change between two steps. `num_prefilled` counts the prompt tokens that ran through the
    model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: SamplingSettings,
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_rows: int,
        device: torch.device,
        take_turns: Callable[[], AbstractContextManager[None]],
        is_recurrent: bool,
    ) -> None:
        self.num_prefilled = 0
        self._model, self._settings, self._seed = model, settings, seed
        self._stop_ids = stop_ids
        self._stops = torch.tensor(sorted(stop_ids), device=device, dtype=torch.long)
        self._max_rows, self._device = max_rows, device
        self._take_turns = take_turns
        self._positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._is_recurrent = is_recurrent
        self._rows: DecodingRows | None = None
        self._open: dict[tuple[int, int], OpenTurn] = {}
        self._queue: dict[tuple[int, int], OpenTurn] = {}  # the open turns without a row
        self._cached_rows: dict[tuple[int, int], CachedRow] = {}  # the oldest first
        self._ended_turns: list[SampledTurn] = []
        self._num_arrived = 0  # turns submitted since rows were last joined
        self._num_forwards = 0  # since then

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_kept(self) -> int:
        """How many ended turns have a cached row."""
        return len(self._cached_rows)

    def submit(self, request: TurnRequest) -> None:
        check_turn(request, self._positions)
        if request.key in self._open:
            raise ValueError(f"a turn of episode {request.key} is open already")
        self._open[request.key] = self._queue[request.key] = OpenTurn(request)
        self._num_arrived += 1

    def step(self) -> list[SampledTurn]:
        with self._take_turns():
            for _ in range(_STEP_FORWARDS):
                if self._must_join():
                    self._join()
                elif self._rows is not None:
                    self._num_forwards += 1
                    self._extend(self._rows, self._rows.forward(self._model))
                if self._ended_turns or not self._open:
                    break
        ended_turns, self._ended_turns = self._ended_turns, []
        return ended_turns

    def forget(self, key: tuple[int, int]) -> None:
        self._cached_rows.pop(key, None)
        turn = self._open.pop(key, None)
        if turn is None or self._queue.pop(key, None) is not None or self._rows is None:
            return
        if turn in self._rows.turns:  # not in them: its prefill has failed
            self._rows.drop(turn)

    # ---- which rows are decoded ---------------------------------------------------------------

    def _must_join(self) -> bool:
        """Whether finished rows should be dropped and waiting turns get rows before the next token.

        Each time all rows that go on are copied. So the answer is yes if a quarter of the rows have
        finished, or if as many new turns wait and have room. Fewer new turns wait for a few forward
        passes, so that turns that arrive one by one do not take a copy each.
        """
        if self._rows is None:
            return bool(self._queue)
        enough = max(1, _FREE_FRACTION * len(self._rows))
        num_admitted = min(self._max_rows - self._rows.num_alive, len(self._queue))
        if len(self._rows) - self._rows.num_alive >= enough:
            return True
        are_due = num_admitted >= enough or self._num_forwards >= _STEP_FORWARDS
        return self._num_arrived > 0 and num_admitted > 0 and are_due

    def _join(self) -> None:
        """Drop finished rows, prefill as many waiting turns as there is room for, and join all."""
        parts = [] if self._rows is None else [self._rows]
        num_free = self._max_rows - sum(part.num_alive for part in parts)
        admitted = [self._queue.pop(key) for key in list(self._queue)[:num_free]]
        for turn in admitted:
            cached_row = self._cached_rows.pop(turn.request.key, None)
            if cached_row is not None and turn.request.ids[: len(cached_row.ids)] == cached_row.ids:
                turn.cached_row = cached_row
        parts.extend(
            self._prefilled(chunk)
            for chunk in prefill_chunks(admitted, pads=not self._is_recurrent)
        )
        self._rows = join_rows(parts, max_tokens=self._settings.max_response_tokens)
        for cached_row in self._cached_rows.values():
            cached_row.detach()
        self._num_arrived = self._num_forwards = 0

    def _prefilled(self, turns: list[OpenTurn]) -> DecodingRows:
        """Run the tokens before turns through the model, and return rows with one sampled token."""
        pad_id = min(self._stop_ids, default=0)  # any valid id: it is masked
        prefilled = prefill(
            self._model,
            turns,
            pad_id=pad_id,
            device=self._device,
            is_recurrent=self._is_recurrent,
        )
        self.num_prefilled += prefilled.num_tokens
        max_tokens = self._settings.max_response_tokens
        # One more draw than tokens: a finished row still takes one, unused.
        seeds = [draw_seed(self._seed, turn.request) for turn in turns]
        draws = uniform_draws(seeds, num_tokens=max_tokens + 1)
        cache_rows = self._on_device(prefilled.rows)
        rows = DecodingRows(
            turns,
            cache=prefilled.cache,
            cache_rows=cache_rows,
            cache_mask=None,
            width=prefilled.width,
            prompt_lengths=self._on_device([len(turn.request.ids) for turn in turns]),
            draws=draws.to(self._device),
            budgets=self._on_device([min(turn.request.max_tokens, max_tokens) for turn in turns]),
            counts=torch.zeros_like(cache_rows),
            last_ids=torch.zeros_like(cache_rows),
        )
        self._extend(rows, prefilled.logits[cache_rows])
        for turn in turns:
            turn.cached_row = None
        return rows

    def _on_device(self, numbers: list[int]) -> Int[Tensor, " R"]:
        return torch.tensor(numbers, device=self._device)

    # ---- tokens -------------------------------------------------------------------------------

    def _extend(self, rows: DecodingRows, logits: Float[Tensor, "R V"]) -> None:
        """Sample every row's next token from its logits, and end the turns that finish with it.

        The cache of an ended turn is kept, unless the model has recurrent layers.
        """
        ids, logprobs = sample_tokens(logits, rows.uniforms(), self._settings)
        finished = rows.record(ids, logprobs, stop_ids=self._stops)
        if not finished:
            return
        turns = rows.write_out(finished)
        for turn, cached_row in zip(turns, rows.make_cached_rows(finished), strict=True):
            request = turn.request
            del self._open[request.key]
            if not self._is_recurrent:
                self._cached_rows[request.key] = cached_row
            has_ended = turn.ids[-1] in self._stop_ids
            self._ended_turns.append(
                SampledTurn(request, tuple(turn.ids), tuple(turn.logprobs), has_ended)
            )
        while len(self._cached_rows) > self._max_rows:
            del self._cached_rows[next(iter(self._cached_rows))]
