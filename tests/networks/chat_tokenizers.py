"""Byte-level tokenizers in the shapes of well-known models: templates and special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Shape:
    """`special` are marked special, and have a role only where `roles` name them."""

    template: str
    special: tuple[str, ...]
    roles: dict[str, str] = field(default_factory=dict)
    strips_right: tuple[str, ...] = ()


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "qwen_base": Shape(
        CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    ),
    "gemma": Shape(
        "{{ bos_token }}{% for m in messages %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"},
    ),
    "phi3": Shape(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        strips_right=("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    ),
    "llama3": Shape(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        "{% endif %}",
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|python_tag|>"),
        ),
        {"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"},
    ),
    "mistral": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
        "[/INST]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
        "{% else %}{{ raise_exception('only users and assistants speak') }}{% endif %}{% endfor %}",
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[THINK]", "[/THINK]"),
        {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"},
    ),
}
"""As `SHAPES[name]` of Qwen base, Gemma, Phi-3, Llama 3 and Mistral."""


@cache
def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a shape, which nobody changes: one token a byte, and some of two letters."""
    return made_tokenizer(SHAPES[name])


def made_tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["th", "Ġa", "42", "im", "en", "end"]
    merges = [("t", "h"), ("Ġ", "a"), ("4", "2"), ("i", "m"), ("e", "n"), ("en", "d")]
    vocabulary = {token: i for i, token in enumerate([*letters, *pieces])}
    plain = Tokenizer(models.BPE(vocabulary, merges))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(
        [AddedToken(t, special=True, rstrip=t in shape.strips_right) for t in shape.special]
    )
    bos = shape.roles.get("bos_token")
    if bos is not None:
        plain.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, plain.token_to_id(bos))]
        )
    roles = {"pad_token": shape.roles["eos_token"], **shape.roles}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **roles)
    tokenizer.chat_template = shape.template
    return tokenizer


def text_of(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """All of it, as the tokens have it."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens of the text alone, special tokens among them."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
