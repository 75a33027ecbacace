"""Load a folder's tokenizer as it was saved, and compare two tokenizers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from vapo.errors import UserError


def read_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder or of a hub id, exactly as `save_pretrained` wrote it.

    For a plain tokenizer.json AutoTokenizer would use the class of the model's architecture. For
    Qwen2 that class drops spaces and adds a token that the embedding does not have.
    """
    class_name = get_tokenizer_config(path).get("tokenizer_class")
    is_plain = class_name in ("TokenizersBackend", "PreTrainedTokenizerFast")
    loader = PreTrainedTokenizerFast if is_plain else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(path, trust_remote_code=False)
    return tokenizer


def start_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the start token's id in a tuple, or () if the tokenizer starts texts without one."""
    bos = tokenizer.bos_token_id
    with_special = tokenizer("")["input_ids"]
    return (bos,) if bos is not None and bos in with_special[:1] else ()


def with_start(ids: Sequence[int], start: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of a whole text with the start token before them.

    A text that has the start token already, as chat templates may render it, is unchanged.

    Args:
        start: the tokenizer's start token in a tuple, or () if it has none (`start_ids`).
    """
    return tuple(ids) if tuple(ids[: len(start)]) == start else (*start, *ids)


_ONE_TOKENIZER = (
    "actor and critic must share one tokenizer: critic.init=policy starts the critic from the actor"
)


def check_same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> None:
    """Check that two tokenizers have the same vocabulary, begin token and end token.

    Their padding tokens may differ, because padding is masked.

    Raises: UserError: they differ.
    """
    names = f"tokenizers of {a.name_or_path} and {b.name_or_path}"
    vocab_a, vocab_b = a.get_vocab(), b.get_vocab()
    if vocab_a != vocab_b:
        differing = sorted(
            token for token in {*vocab_a, *vocab_b} if vocab_a.get(token) != vocab_b.get(token)
        )
        raise UserError(
            f"{names} differ in {len(differing)} tokens ({', '.join(map(repr, differing[:3]))}); "
            f"{_ONE_TOKENIZER}"
        )
    for role in ("eos_token_id", "bos_token_id"):
        if getattr(a, role) != getattr(b, role):
            raise UserError(
                f"{names} differ in {role}: {getattr(a, role)} and {getattr(b, role)}; "
                f"{_ONE_TOKENIZER}"
            )


def end_token_ids(
    generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return the ids of the tokenizer's end token and of those in the model's generation config."""
    configured = getattr(generation_config, "eos_token_id", None)
    if configured is None:
        configured = []
    elif isinstance(configured, int):
        configured = [configured]
    return frozenset([int(tokenizer.eos_token_id), *map(int, configured)])


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 12 hex digits of a digest of the tokenizer's vocabulary, begin token and end token."""
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
