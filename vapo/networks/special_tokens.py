"""A tokenizer's special tokens: their ids, and patterns that find their texts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokens with a role, as the end token, or with the mark `special`.

    Turn markers often have no role: Llama 3's `<|eot_id|>` is only marked.
    """
    marked_ids = (id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *marked_ids])


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the special tokens except for padding and the unknown token.

    Those two may stand for ordinary text. They are included if they also begin or end texts.
    """
    harmless = {tokenizer.unk_token_id, tokenizer.pad_token_id}
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    return special_ids(tokenizer) - harmless | ends


def special_text(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that matches the text of any special token."""
    return text_of_any(special_ids(tokenizer), tokenizer)


def text_of_any(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that matches the text of any of these tokens.

    Of two texts that begin alike it matches the longer one. The tokens must be special or added
    ones, whose text is their name.
    """
    texts = {str(token) for token in tokenizer.convert_ids_to_tokens(sorted(ids))}
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
