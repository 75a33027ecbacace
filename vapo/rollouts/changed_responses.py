"""A rollout with another response: a part of its own, or one that was continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from vapo.types import FinishReason, Rollout, Turn


def with_response(
    rollout: Rollout,
    response_ids: Sequence[int],
    rollout_logprobs: Sequence[float],
    finish_reason: FinishReason,
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """A response with these tokens and log-probabilities, and their text; nobody has judged it."""
    return replace(
        rollout,
        response_ids=tuple(response_ids),
        response_text=str(tokenizer.decode(list(response_ids), skip_special_tokens=True)),
        rollout_logprobs=tuple(rollout_logprobs),
        finish_reason=finish_reason,
        turns=(Turn(0, len(response_ids)),),
        is_correct=None,
        extracted=None,
        failure=None,
    )
