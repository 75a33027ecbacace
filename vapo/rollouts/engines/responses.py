"""What all engines share: which token ends a response, which prompts fit, errors, rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from vapo.errors import UserError
from vapo.rollouts.engines.contract import TurnRequest
from vapo.system.seeding import derive_seed
from vapo.types import FinishReason, Prompt, Rollout


class NonFiniteLogitsError(RuntimeError):
    """The policy's logits are NaN or infinite: its weights have diverged or overflow."""

    def __init__(self, prompt_id: str) -> None:
        super().__init__(
            f"the policy's logits after prompt {prompt_id} are not finite: its weights "
            "have diverged (look at actor/grad_norm) or overflow in this dtype"
        )


@dataclass
class Response:
    """One requested response, filled in as it is decoded: sample j of prompt i by its `key`."""

    prompt: Prompt
    key: tuple[int, int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def requested_responses(prompts: Sequence[Prompt], group_size: int) -> list[Response]:
    """Make `group_size` empty responses to each prompt; groups contiguous, in prompt order."""
    if group_size < 1:
        raise ValueError("group_size must be at least 1")
    return [Response(prompt, (i, j)) for i, prompt in enumerate(prompts) for j in range(group_size)]


def check_lengths(
    prompts: Sequence[Prompt], max_response_tokens: int, num_positions: int | None
) -> None:
    """Raises: UserError if a prompt is empty, or with its budget exceeds the positions."""
    for prompt in prompts:
        if not prompt.prompt_ids:
            raise UserError(f"prompt {prompt.prompt_id} has no tokens: nothing to continue")
        budget = prompt.budget(max_response_tokens)
        if budget < 1:
            raise ValueError(f"prompt {prompt.prompt_id}: a response has at least one token")
        needed = len(prompt.prompt_ids) + budget
        if num_positions is not None and needed > num_positions:
            raise UserError(
                f"prompt {prompt.prompt_id} has {len(prompt.prompt_ids)} tokens; with "
                f"{budget} of response that is more than the model's {num_positions} "
                "positions: lower max_response_tokens or data.max_prompt_tokens"
            )


def check_turn(request: TurnRequest, num_positions: int | None) -> None:
    """Raises: UserError if there is nothing to continue, or the turn exceeds the positions."""
    name = turn_name(request)
    if request.max_tokens < 1:
        raise ValueError(f"{name}: a turn has at least one token")
    if not request.ids:
        raise UserError(f"{name} has no tokens before it: nothing to continue")
    needed = len(request.ids) + request.max_tokens
    if num_positions is not None and needed > num_positions:
        raise UserError(
            f"{name} has {len(request.ids)} tokens before it; with {request.max_tokens} more that "
            f"is more than the model's {num_positions} positions: lower max_response_tokens or "
            "data.max_prompt_tokens"
        )


def turn_name(request: TurnRequest) -> str:
    """What messages call a turn."""
    i, j = request.key
    return f"{i} (sample {j}, turn {request.turn})"


def draw_seed(seed: int, request: TurnRequest) -> int:
    """The seed of a turn's random numbers; of a first turn that of (prompt i, sample j) alone."""
    key = request.key if request.turn == 0 else (*request.key, request.turn)
    return derive_seed(seed, "response", *key)


def make_rollouts(
    responses: Sequence[Response],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
) -> list[Rollout]:
    """Turn finished responses into rollouts: STOP if the last token is an end token."""
    if not responses:
        return []  # a batch of none decodes to one text
    texts = tokenizer.batch_decode(
        [response.ids for response in responses], skip_special_tokens=True
    )
    return [
        Rollout(
            prompt=response.prompt,
            response_ids=tuple(response.ids),
            response_text=text,
            rollout_logprobs=tuple(response.logprobs),
            finish_reason=(
                FinishReason.STOP if response.ids[-1] in end_ids else FinishReason.LENGTH
            ),
        )
        for response, text in zip(responses, texts, strict=True)
    ]
