"""What a response is worth that is ended half-way: a guess, judged as any other response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from vapo.errors import UserError
from vapo.rewards.scorer import Scorer
from vapo.rollouts.changed_responses import with_response
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.types import Rollout, Verdict

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
    sampler: Sampler,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    settings: SamplingSettings,
    seed: int,
    advance: Callable[[int], None] = lambda n: None,
) -> list[Verdict]:
    """The verdict on each response that is cut at its middle token and made to answer there.

    The engine continues it from `answer_ids` for up to 16 tokens, within the response budget.
    """
    starts = [(*r.response_ids[: half_way(r)], *answer_ids) for r in rollouts]
    room = settings.max_response_tokens - max(map(len, starts))
    prompts = [
        replace(
            rollout.prompt,
            prompt_id=f"{rollout.prompt.prompt_id}, half-way",
            prompt_ids=(*rollout.prompt.prompt_ids, *start),
        )
        for rollout, start in zip(rollouts, starts, strict=True)
    ]
    found = sampler.sample(
        prompts,
        group_size=1,
        settings=replace(settings, max_response_tokens=min(_ANSWER_TOKENS, room)),
        seed=seed,
        advance=advance,
    )
    answered = []
    for rollout, start, end in zip(rollouts, starts, found, strict=True):
        ids = (*start, *end.response_ids)
        logprobs = (0.0,) * len(start) + end.rollout_logprobs
        answered.append(with_response(rollout, ids, logprobs, end.finish_reason, tokenizer))
    return scorer.score(answered)
