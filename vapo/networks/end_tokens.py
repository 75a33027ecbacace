"""The tokens that end a policy's turn: the one that it learns, and all that are read as an end.

A base model's tokenizer may name one end token while its chat template ends turns with another.
Those of Qwen, Gemma and Phi-3 do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from vapo.config.schema import DataConfig
from vapo.errors import UserError
from vapo.networks.generation_files import read_generation_config, with_end_tokens
from vapo.networks.model_configs import read_model_config
from vapo.networks.saved_tokenizers import end_token_ids
from vapo.networks.special_tokens import special_ids
from vapo.user_code.chat_templates import TemplateRefusal, render_chat

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class EndTokens:
    """The end tokens of a policy.

    `imitated_id` ends each turn that the policy learns to imitate. Any of `ids` ends a sampled
    turn.
    """

    imitated_id: int
    ids: frozenset[int]


def end_tokens(
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None = None,
    *,
    data: DataConfig | None = None,
) -> EndTokens:
    """Return the end tokens of a policy.

    Args:
        generation_config: the model's, whose end tokens are among them; None: it names none.
        data: says whether prompts use the tokenizer's chat template, and with which variables. If
            they do, a turn ends as the template ends an assistant's message. None: prompts use the
            template if there is one, without variables.

    Raises: UserError: the chat template refuses an assistant's message.
    """
    is_chat = bool(tokenizer.chat_template) if data is None else data.chat_template
    variables = NO_VARIABLES if data is None else data.chat_template_kwargs
    template_id = template_end(tokenizer, variables) if is_chat else None
    imitated_id = int(tokenizer.eos_token_id) if template_id is None else template_id
    return EndTokens(imitated_id, end_token_ids(generation_config, tokenizer) | {imitated_id})


def folder_end_tokens(
    path: str, tokenizer: PreTrainedTokenizerBase, *, data: DataConfig | None = None
) -> EndTokens:
    """Return the `end_tokens` of the policy in a folder, without loading its weights.

    Raises: UserError: the folder has no model, or its chat template refuses an assistant's message.
    """
    generation = read_generation_config(path, read_model_config(path))
    return end_tokens(tokenizer, generation, data=data)


def name_end_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ends: EndTokens,
    generation: bytes | None,
) -> bytes | None:
    """Give the model a new generation config that holds only the end tokens.

    The tokenizer's own end token is the first of them. Programs that load the model then end a
    response where this policy does.

    Args:
        generation: the source's generation_config.json, if it has one.

    Returns: `generation` with these end tokens. It is unchanged if the model's end tokens were
        exactly these already, and None if it is None.
    """
    named_ids = end_token_ids(model.generation_config, tokenizer)
    first = int(tokenizer.eos_token_id)
    ordered_ids = [first, *sorted(ends.ids - {first})]
    model.generation_config = GenerationConfig(
        eos_token_id=ordered_ids if ordered_ids[1:] else first
    )
    if generation is None or ends.ids == named_ids:
        return generation
    return with_end_tokens(generation, ordered_ids)


def template_end(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] = NO_VARIABLES
) -> int | None:
    """Return the id of the token that the chat template writes behind an assistant's message.

    None: there is no chat template, or what follows the message is not a special token.

    Raises: UserError: the template refuses such a message, with and without a system message.
    """
    if not tokenizer.chat_template:
        return None
    answer = "What the assistant says."
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": answer}]
    try:
        text = render_chat(tokenizer, turns, **variables)
    except TemplateRefusal:
        try:
            turns = [{"role": "system", "content": "Do it."}, *turns]
            text = render_chat(tokenizer, turns, **variables)
        except TemplateRefusal as error:
            raise UserError(f"the tokenizer's chat template fails: {error}") from None
    _, answer_in_text, rest = text.rpartition(answer)
    ids: list[int] = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"]
    return ids[0] if answer_in_text and ids and ids[0] in special_ids(tokenizer) else None


def turn_ids_with_end(text: str, tokenizer: PreTrainedTokenizerBase, ends: EndTokens) -> list[int]:
    """Return the token ids of a turn that is given as text, with the token that ends the turn.

    A text that already ends with an end token keeps that token. What follows it (a line break, a
    second end token) would never be sampled, so it is left out.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    num_content = len(ids)
    while num_content and (
        ids[num_content - 1] in ends.ids or _is_blank(ids[num_content - 1], tokenizer)
    ):
        num_content -= 1
    for index in range(num_content, len(ids)):
        if ids[index] in ends.ids:
            return ids[: index + 1]
    return [*ids, ends.imitated_id]


def _is_blank(id_: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a token's text is empty or white space."""
    return not str(tokenizer.decode([id_])).strip()
