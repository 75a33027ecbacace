"""A folder's tokenizer as it was saved."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config


def read_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer that `save_pretrained` wrote.

    AutoTokenizer takes the class of the model's architecture where a plain tokenizer.json was
    saved: for Qwen2 that drops spaces and adds a token that the embedding does not have.
    """
    saved = get_tokenizer_config(path).get("tokenizer_class")
    plain = saved in ("TokenizersBackend", "PreTrainedTokenizerFast")
    loader = PreTrainedTokenizerFast if plain else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(path, trust_remote_code=False)
    return tokenizer


def start_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The start token, if this tokenizer begins texts with one."""
    bos = tokenizer.bos_token_id
    with_special = tokenizer("")["input_ids"]
    return (bos,) if bos is not None and bos in with_special[:1] else ()
