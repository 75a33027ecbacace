"""A small Qwen2-architecture policy with a one-character tokenizer, built from scratch."""

from __future__ import annotations

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from vapo.config.schema import NewModelConfig
from vapo.errors import UserError

PAD, EOS = "<pad>", "<|endoftext|>"


def make_tokenizer(alphabet: str) -> Qwen2Tokenizer:
    """Make a Qwen2 tokenizer with a token for each character of an alphabet.

    It has two more tokens, for padding and for the end of a text. It drops all other characters.
    Transformers loads every tokenizer of a Qwen2 model as one of this class.

    Raises: UserError: a character occurs twice.
    """
    if len(set(alphabet)) != len(alphabet):
        raise UserError("new_model.alphabet: a character occurs twice; list each once")
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], pad_token=PAD, eos_token=EOS, unk_token=EOS, bos_token=None
    )


def make_model(settings: NewModelConfig, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Make a model with random weights and tied embeddings. Seed torch before the call.

    Raises: UserError: the hidden size is not a multiple of the number of heads.
    """
    if settings.hidden_size % settings.num_heads:
        raise UserError(
            f"new_model.hidden_size {settings.hidden_size} must be a multiple of "
            f"new_model.num_heads {settings.num_heads}"
        )
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.num_heads,
            num_key_value_heads=settings.num_heads,
            max_position_embeddings=settings.max_position_embeddings,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
