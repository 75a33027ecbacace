"""The sampler's contract: turns in, sampled tokens with their log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.config.schema import RolloutConfig
from vapo.errors import StoppedRun, UserError
from vapo.system.process import derive_seed

# All weights of the actor, as (name, full tensor) pairs of its state dict. Every rank must call it
# and iterate over what it gives.
Weights = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are sampled, and how many a response may have.

    `top_k` 0 keeps all tokens; `top_p` 1 keeps all probability mass. `greedy` takes the likeliest
    token instead of drawing one.
    """

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


def sampling_settings(config: RolloutConfig) -> SamplingSettings:
    """Return the sampling settings of training rollouts, as the config has them."""
    return SamplingSettings(
        max_response_tokens=config.max_response_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )


@dataclass(frozen=True)
class TurnRequest:
    """A request to sample one turn of the episode with this `key` (prompt i, sample j).

    `ids` are all tokens before the turn: the prompt, and the earlier turns exactly as they were
    sampled and observed. `turn` counts from 0. At most `max_tokens` tokens are sampled. `prompt_id`
    names the prompt in messages.
    """

    key: tuple[int, int]
    turn: int
    ids: tuple[int, ...]
    max_tokens: int
    prompt_id: str = ""


@dataclass(frozen=True)
class SampledTurn:
    """The tokens sampled for a request, an end token included, with a log-prob for each token.

    `has_ended` is False if the turn reached its limit of tokens before an end token came. `updates`
    has pairs (number of weight updates since the request, number of tokens), in order. It is empty
    if the engine does not know which weights sampled which token.
    """

    request: TurnRequest
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    has_ended: bool
    updates: tuple[tuple[int, int], ...] = ()


def sampled_text(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int] = (),
    *,
    keeps_special: bool = True,
) -> str:
    """Return the text of sampled tokens, as verifiers, functions and environments read it.

    The end token at the very end is left out, and so is padding behind it. Every other special
    token is a part of what the policy said and stays: a tag, the call of a tool, a turn marker in
    the middle. Spaces are as the tokens have them. Bytes that form no character are U+FFFD.

    Args:
        end_ids: the tokens that may have ended the response; empty where it was cut off.
        keeps_special: as `rewards.keep_special_tokens`; False leaves out all special tokens.
    """
    spoken = ids_before_end(ids, tokenizer, end_ids)
    if not spoken:
        return ""
    return str(
        tokenizer.decode(
            spoken, skip_special_tokens=not keeps_special, clean_up_tokenization_spaces=False
        )
    )


def has_ended(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
) -> bool:
    """Whether the tokens end in an end token, which padding alone may follow."""
    return len(ids_before_end(ids, tokenizer, end_ids)) < len(ids)


def ids_before_end(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int] = ()
) -> list[int]:
    """Return the tokens without any end tokens at the end, and without padding behind these.

    Pad ids at the end that follow no end token stay: the policy sampled them.
    """
    padding = {tokenizer.pad_token_id}.difference(end_ids)
    before_padding = len(ids)
    while before_padding and ids[before_padding - 1] in padding:
        before_padding -= 1
    before_end = before_padding
    while before_end and ids[before_end - 1] in end_ids:
        before_end -= 1
    return list(ids[:before_end] if before_end < before_padding else ids)


class TurnStream(Protocol):
    """Samples the turns of many episodes together, each for as long as it takes.

    The tokens of a turn depend on the weights, its ids, the settings and (seed, i, j, turn) only,
    not on what else is sampled beside it (up to floating point).
    """

    def submit(self, request: TurnRequest) -> None:
        """Take a turn, to sample it as soon as there is room. An episode has one open turn at most.

        Raises: UserError: no tokens are before the turn, or the model does not take that many.
        """

    def step(self) -> list[SampledTurn]:
        """Sample for a short while, and return the turns that ended. If none is open, do not wait.

        Raises:
            EngineError: the engine failed.
            NonFiniteLogitsError: the policy gives no distribution to sample from.
        """

    def forget(self, key: tuple[int, int]) -> None:
        """End the episode with this key: drop its open turn, and free what is cached of it."""

    @property
    def num_open(self) -> int:
        """How many turns were submitted and have not been returned."""


class Sampler(Protocol):
    """An engine that samples turns from the current policy; a response is one turn."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a response, or a turn."""

    def turns(self, settings: SamplingSettings, *, seed: int) -> AbstractContextManager[TurnStream]:
        """Return a context with a stream that samples turns; it ends with the context.

        Every rank must enter and leave the context, as an engine may gather the actor's shards.
        Nothing inside is a collective of the ranks, so each rank may have as many turns as it
        needs.
        """

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sample with new weights of the actor from now on.

        `weights` are (name, full tensor) pairs of its state dict. Another thread may call this
        while the engine samples. An engine with weights of its own takes the new ones between two
        steps, and open turns go on with them.
        """

    def sleep(self) -> None:
        """Free device memory until the next `sync` or `turns`, if the engine has memory to free."""

    def close(self) -> None:
        """Free the engine."""


class NonFiniteLogitsError(StoppedRun):
    """The policy's logits are NaN or infinite: its weights have diverged or overflow.

    No token can be sampled, so the run ends itself. One rank alone may raise this.
    """

    def __init__(self, prompt_id: str) -> None:
        super().__init__(
            f"the policy's logits after prompt {prompt_id} are not finite: its weights "
            "have diverged (look at actor/grad_norm) or overflow in this dtype"
        )


def check_turn(request: TurnRequest, num_positions: int | None) -> None:
    """Check that a model with `num_positions` positions can sample a turn.

    If `num_positions` is None, any length is allowed.

    Raises:
        UserError: the turn has no tokens before it, or needs more than `num_positions`.
        ValueError: the request allows the turn no token.
    """
    name = turn_name(request)
    if request.max_tokens < 1:
        raise ValueError(f"prompt {name}: a turn has at least one token")
    if not request.ids:
        raise UserError(f"prompt {name} has no tokens: nothing to continue")
    num_tokens = len(request.ids) + request.max_tokens
    if num_positions is not None and num_tokens > num_positions:
        has = "has" if request.turn == 0 else "has with its earlier turns"
        raise UserError(
            f"prompt {name} {has} {len(request.ids)} tokens; with {request.max_tokens} of response "
            f"that is more than the model's {num_positions} positions: lower "
            "max_response_tokens or data.max_prompt_tokens"
        )


def turn_name(request: TurnRequest) -> str:
    """Return how messages name a turn: by its prompt's id, and its number after the first turn."""
    return request.prompt_id + (f", turn {request.turn}" if request.turn else "")


def draw_seed(seed: int, request: TurnRequest) -> int:
    """Return the seed of a turn's random numbers.

    It depends on `seed`, the episode's key and the turn's number.
    """
    key = request.key if request.turn == 0 else (*request.key, request.turn)
    return derive_seed(seed, "response", *key)
