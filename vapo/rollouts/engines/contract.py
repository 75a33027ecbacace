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
    """How to sample. `top_k` 0 keeps all tokens; `top_p` 1 keeps all mass.

    `greedy` takes the likeliest token instead of drawing one.
    """

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


def sampling_settings(config: RolloutConfig) -> SamplingSettings:
    """The sampling settings of training rollouts."""
    return SamplingSettings(
        max_response_tokens=config.max_response_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )


@dataclass(frozen=True)
class TurnRequest:
    """One turn to sample of the episode `key` (prompt i, sample j).

    `ids` are all tokens before it: the prompt, and the earlier turns exactly as they were sampled
    and observed. `turn` counts from 0; at most `max_tokens` tokens are sampled. `prompt_id` is
    what messages call it by.
    """

    key: tuple[int, int]
    turn: int
    ids: tuple[int, ...]
    max_tokens: int
    prompt_id: str = ""


@dataclass(frozen=True)
class SampledTurn:
    """What was sampled for a request, an end token included, with a log-prob for each token.

    `has_ended` is False where the tokens ran out before an end token came. `updates` are those of
    `Turn`, from an engine that knows which weights sampled which token.
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
    """The text of tokens that a policy sampled, as verifiers, functions and environments read it.

    The end token at the very end is left out, and so is padding behind it. Every other special
    token is a part of what the policy said and stays: a tag, the call of a tool, a turn marker in
    the middle. Spaces are as the tokens have them. Bytes that are no whole character are U+FFFD.

    Args:
        end_ids: the tokens that may have ended them; none where they were cut.
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
    """Whether an end token stands behind all others, but for padding."""
    return len(ids_before_end(ids, tokenizer, end_ids)) < len(ids)


def ids_before_end(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int] = ()
) -> list[int]:
    """The tokens without the end tokens, and padding behind those, that stand behind all others.

    Padding that no end token stands before is no padding: the policy sampled it.
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
    """Turns of many episodes that are sampled together, each for as long as it takes.

    The tokens of a turn depend on the weights, its ids, the settings and (seed, i, j, turn) only,
    not on what else is sampled beside it (up to floating point).
    """

    def submit(self, request: TurnRequest) -> None:
        """Sample this turn as soon as there is room. One turn of an episode is open at a time.

        Raises:
            UserError: there are no tokens before it, or with its own more than the model takes.
        """

    def step(self) -> list[SampledTurn]:
        """Sample on, for a short while, and return the turns that ended; without any, at once.

        Raises:
            EngineError: the engine failed.
            NonFiniteLogitsError: the policy gives no distribution to sample from.
        """

    def forget(self, key: tuple[int, int]) -> None:
        """The episode is over: what is kept of its tokens may go. An open turn of it is dropped."""

    @property
    def num_open(self) -> int:
        """How many turns were submitted and have not been returned."""


class Sampler(Protocol):
    """An engine that samples turns from the current policy; a response is one turn."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a response, or a turn."""

    def turns(self, settings: SamplingSettings, *, seed: int) -> AbstractContextManager[TurnStream]:
        """A stream of turns, which ends with the context.

        Nothing in it is a collective of the ranks but entering and leaving it, so each rank may
        have as many turns as its own episodes need. Every rank must enter it: an engine may gather
        the actor's shards.
        """

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the actor's new weights, as (name, full tensor) pairs of its state dict.

        Another thread may call this while it samples: an engine that has weights of its own takes
        them between two steps, and open turns go on with them.
        """

    def sleep(self) -> None:
        """Free memory until the next `sync` or `turns`; nothing to do for some engines."""

    def close(self) -> None:
        """Free the engine."""


class NonFiniteLogitsError(StoppedRun):
    """The policy's logits are NaN or infinite: its weights have diverged or overflow.

    Nothing can be sampled from it, so the run ends itself. One rank alone may find it.
    """

    def __init__(self, prompt_id: str) -> None:
        super().__init__(
            f"the policy's logits after prompt {prompt_id} are not finite: its weights "
            "have diverged (look at actor/grad_norm) or overflow in this dtype"
        )


def check_turn(request: TurnRequest, num_positions: int | None) -> None:
    """Raises: UserError if there is nothing to continue, or the turn exceeds the positions."""
    name = turn_name(request)
    if request.max_tokens < 1:
        raise ValueError(f"prompt {name}: a turn has at least one token")
    if not request.ids:
        raise UserError(f"prompt {name} has no tokens: nothing to continue")
    needed = len(request.ids) + request.max_tokens
    if num_positions is not None and needed > num_positions:
        has = "has" if request.turn == 0 else "has with its earlier turns"
        raise UserError(
            f"prompt {name} {has} {len(request.ids)} tokens; with {request.max_tokens} of response "
            f"that is more than the model's {num_positions} positions: lower "
            "max_response_tokens or data.max_prompt_tokens"
        )


def turn_name(request: TurnRequest) -> str:
    """What messages call a turn: its prompt's id, and the number of a later turn."""
    return request.prompt_id + (f", turn {request.turn}" if request.turn else "")


def draw_seed(seed: int, request: TurnRequest) -> int:
    """The seed of a turn's random numbers; of a first turn that of (prompt i, sample j) alone."""
    key = request.key if request.turn == 0 else (*request.key, request.turn)
    return derive_seed(seed, "response", *key)
