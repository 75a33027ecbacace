"""What the critic alone reads before a response: a text with more in it than the policy's prompt.

Rendered and tokenized once for each prompt. The ids stand beside the policy's own in `Prompt`, and
only the critic's inputs are made of them, or those of the pass in which OPPO's policy is told the
answer.
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
from vapo.networks.critic_folders import critic_path
from vapo.networks.model_configs import read_model_config
from vapo.networks.saved_tokenizers import start_ids, with_start
from vapo.prompts.load import PromptSplit, token_ids
from vapo.prompts.training_set import TrainingSet
from vapo.system.row_values import value_text
from vapo.types import Prompt

_KEY = "critic.prompt.template"
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


def with_critic_prompts(
    split: PromptSplit, config: FitConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptSplit:
    """Add the critic's own prompts to both sets, or OPPO's with the answer; unchanged where there
    are none.

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
    """What adds the critic's own prompts to prompts, with room behind them for responses of so
    many tokens; None where the critic reads the policy's. OPPO's are added alike.

    It raises what `with_critic_prompts` does.
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
    """Put the prompt's text, its answer and columns of its row in their places, as they are.

    {prompt} is the policy's whole input text, a chat template's marks included. What is put in is
    not searched for places again.

    Raises: UserError: the row has no such column, or no text or number in it.

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
            lacks = f"{cell!r:.40} in that column, which is no text or number"
        columns = ", ".join(["prompt", "answer", *map(str, prompt.record)])
        raise UserError(
            f"{key} has {{{name}}}, and {prompt.prompt_id} has {lacks}; places are {columns}"
        )

    return _PLACE.sub(value, template)


def _check_answer(template: str, prompt: Prompt) -> None:
    """Without one the two prompts differ by nothing that could tell of success."""
    if "{answer}" in template and not prompt.answer:
        raise UserError(
            f"algorithm.oppo.template has {{answer}}, and {prompt.prompt_id} has none: leave the "
            "row out, or put another column into the template that tells the answer"
        )


def _check_lengths(
    prompts: list[Prompt], max_response_tokens: int, positions: int | None, key: str
) -> None:
    """It is never truncated: the answer is at its end."""
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
