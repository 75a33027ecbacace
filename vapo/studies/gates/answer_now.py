"""What a response is worth that is ended half-way: a guess, judged as any other response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from vapo.errors import UserError
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.player import Player
from vapo.types import Rollout, Turn

_ANSWER_TOKENS = 16


def answer_token_ids(
    text: str, tokenizer: PreTrainedTokenizerBase, *, max_response_tokens: int
) -> tuple[int, ...]:
    """The tokens of the text that makes a policy answer.

    Raises: UserError: the tokenizer cannot write it, or it leaves no room for an answer.
    """
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    written = str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
    if not ids or written.strip() != text.strip():
        raise UserError(
            f"--answer_now {text!r}: the tokenizer of actor.path writes it as {written!r}; give a "
            "text that begins the answer of a response, as ';' on the tasks of conf/"
        )
    if max_response_tokens // 2 + len(ids) >= max_response_tokens:
        raise UserError(
            f"--answer_now {text!r} has {len(ids)} tokens, which half of "
            f"rollouts.max_response_tokens ({max_response_tokens}) has no room for"
        )
    return ids


def half_way(rollout: Rollout) -> int:
    """The place of the middle token: so many tokens come before it."""
    return len(rollout.response_ids) // 2


def answered_half_way(
    rollouts: Sequence[Rollout],
    answer_ids: tuple[int, ...],
    *,
    player: Player,
    settings: SamplingSettings,
    seed: int,
    advance: Callable[[int], None] = lambda n: None,
) -> list[Rollout]:
    """Each response cut at its middle token and made to answer there, judged.

    The engine continues it from `answer_ids` for up to 16 tokens, within the response budget.
    """
    starts = [(*r.response_ids[: half_way(r)], *answer_ids) for r in rollouts]
    room = min(_ANSWER_TOKENS, settings.max_response_tokens - max(map(len, starts)))
    return player.play(
        [
            replace(
                rollout,
                prompt=replace(rollout.prompt, max_response_tokens=len(start) + room),
                response_ids=start,
                rollout_logprobs=(0.0,) * len(start),
                turns=(Turn(0, len(start)),),
            )
            for rollout, start in zip(rollouts, starts, strict=True)
        ],
        group_size=1,
        settings=settings,
        seed=seed,
        advance=advance,
    )
