"""A tokenizer's special tokens: which they are, and where their texts stand."""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens with a role, as the end token, and those that the tokenizer's files mark special.

    Turn markers often have no role: Llama 3's `<|eot_id|>` is only marked.
    """
    marked_ids = (id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *marked_ids])


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The special tokens but padding, which is no token to a model, and the unknown token.

    Both may stand for ordinary text.
    """
    harmless = {tokenizer.unk_token_id, tokenizer.pad_token_id}
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    return special_ids(tokenizer) - harmless | ends


def special_text(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """A pattern that matches the text of each special token."""
    return text_of_any(special_ids(tokenizer), tokenizer)


def text_of_any(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """A pattern that matches the text of each of these tokens, of two that begin alike the longer.

    They must be tokens whose text is their name: special and added ones.
    """
    texts = {str(token) for token in tokenizer.convert_ids_to_tokens(sorted(ids))}
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
