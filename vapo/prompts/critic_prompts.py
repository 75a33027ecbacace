"""Makes prompts for the critic alone, which may have more in them than the policy's.

They are rendered and tokenized once for each prompt. Their ids are in `Prompt` beside the policy's.
Only the critic's inputs are made from them, or those of OPPO's pass with the answer in the prompt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.config.critic import PrivilegedPrompt
from vapo.config.estimators import OppoOptions
from vapo.errors import UserError
from vapo.files.row_values import value_text
from vapo.networks.critic_folders import critic_path
from vapo.networks.model_configs import read_model_config
from vapo.networks.saved_tokenizers import start_ids, with_start
from vapo.prompts.load import PromptSplit, token_ids
from vapo.prompts.training_set import TrainingSet
from vapo.types import Prompt

_KEY = "critic.prompt.template"
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


def with_critic_prompts(
    split: PromptSplit, config: FitConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptSplit:
    """Return the prompts with the critic's own prompts, or OPPO's with the answer, added to each.

    A config with neither leaves them unchanged.

    Raises: UserError: a row lacks a column of the template, or its prompt and a response of full
        length do not fit the network's positions.
    """
    add_critic_prompts = critic_prompt_adder(config, tokenizer)
    if add_critic_prompts is None:
        return split
    budget, of_evaluation = config.rollouts.max_response_tokens, config.evaluation
    heldout_budget = max(budget, of_evaluation.max_response_tokens or 0)
    sources = [
        replace(
            source,
            stages=tuple(
                replace(s, prompts=add_critic_prompts(s.prompts, budget)) for s in source.stages
            ),
        )
        for source in split.training.sources
    ]
    training = TrainingSet(tuple(sources))
    return replace(
        split, training=training, heldout=add_critic_prompts(split.heldout, heldout_budget)
    )


def critic_prompt_adder(
    config: FitConfig, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Sequence[Prompt], int], list[Prompt]] | None:
    """Return a function that adds the critic's own prompts, or OPPO's, to prompts.

    It is None if the critic reads the policy's prompts. The function's arguments are the prompts
    and the length of the longest response in tokens, for which there must be room. It raises a
    UserError if a row lacks a column of the template, or a prompt leaves too little room.
    """
    critic_prompt, algorithm = config.critic.prompt, config.algorithm
    if isinstance(algorithm, OppoOptions):
        key, template, path = "algorithm.oppo.template", algorithm.oppo.template, config.actor.path
    elif algorithm.has_critic and isinstance(critic_prompt, PrivilegedPrompt):
        key, template, path = _KEY, critic_prompt.template, critic_path(config)
    else:
        return None
    text_config = read_model_config(path).get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    start = () if config.data.chat_template else start_ids(tokenizer)

    def add_critic_prompts(prompts: Sequence[Prompt], max_response_tokens: int) -> list[Prompt]:
        extended_prompts = []
        for prompt in prompts:
            if isinstance(algorithm, OppoOptions):
                _check_answer(template, prompt)
            text, place = render(template, prompt, key=key), f"{key}: {prompt.prompt_id}"
            ids = with_start(token_ids(text, tokenizer, place), start)
            extended_prompts.append(replace(prompt, critic_prompt_ids=ids))
        _check_lengths(extended_prompts, max_response_tokens, positions, key)
        return extended_prompts

    return add_critic_prompts


def render(template: str, prompt: Prompt, *, key: str = _KEY) -> str:
    """Fill a template's `{name}` places with the prompt's text, its answer and columns.

    {prompt} is the policy's whole input text, with a chat template's special tokens. Inserted texts
    are not searched for places.

    Raises: UserError: the row lacks such a column, or the column has neither text nor number.

    >>> render("{prompt} Answer: {answer}", Prompt("file:1", "1+1={x}", (3,), "2"))
    '1+1={x} Answer: 2'
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "prompt":
            return prompt.text
        if name == "answer":
            return prompt.answer
        cell = prompt.record.get(name)
        if isinstance(cell, (str, int)) or (isinstance(cell, float) and math.isfinite(cell)):
            return value_text(cell)
        lacks = "no such column"
        if name in prompt.record:
            lacks = f"{cell!r:.40} in that column, which is neither text nor a number"
        columns = ", ".join(["prompt", "answer", *map(str, prompt.record)])
        raise UserError(
            f"{key} has {{{name}}}, and {prompt.prompt_id} has {lacks}; places are {columns}"
        )

    return _PLACE.sub(value, template)


def _check_answer(template: str, prompt: Prompt) -> None:
    """Check that a template with {answer} gets an answer that is not empty.

    Otherwise OPPO's prompt would equal the policy's.

    Raises: UserError: the template shows the answer, and the prompt's answer is empty.
    """
    if "{answer}" in template and not prompt.answer:
        raise UserError(
            f"algorithm.oppo.template has {{answer}}, but the answer of {prompt.prompt_id} is "
            "empty: leave the row out, or put another column into the template that tells the "
            "answer"
        )


def _check_lengths(
    prompts: list[Prompt], max_response_tokens: int, positions: int | None, key: str
) -> None:
    """Check that each critic prompt with a response of full length fits the network's positions.

    Prompts are never truncated, because the answer is at their end. If `positions` is None, there
    is no limit.

    Raises: UserError: one does not fit.
    """
    if positions is None:
        return
    for prompt in prompts:
        length = len(prompt.critic_prompt_ids or ())
        if length + max_response_tokens > positions:
            raise UserError(
                f"{key}: {prompt.prompt_id} becomes a prompt of {length} tokens, and with a "
                f"response of {max_response_tokens} it does not fit the network's {positions} "
                "positions: shorten the template, leave the row out, or lower "
                "rollouts.max_response_tokens"
            )
