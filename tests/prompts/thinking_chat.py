"""A chat template that thinks, and its tokenizer: what a prompt opens, closes and takes out.

It is written in the manner of Qwen3's: the thoughts of turns before the last question are taken
out, and `enable_thinking=false` writes empty ones, so that the policy answers at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.networks.chat_tokenizers import Shape, made_tokenizer

TEMPLATE = """\
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set answer = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thoughts = '' %}
        {%- if '</think>' in m.content %}
            {%- set thoughts = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > asked.last %}
            {{- '<think>\\n' ~ thoughts ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- answer ~ '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif opens_thoughts %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
{%- if note is defined %}{{ note }}|{{ note is string }}{% endif %}"""

OFF = {"enable_thinking": False}
ASKS = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NO_THOUGHTS = "<think>\n\n</think>\n\n"


@cache
def thinking_tokenizer(*, are_special: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, and one for each tag of the template; nobody changes it.

    Args:
        are_special: whether the tags of thoughts are special tokens, which Qwen3's are not.
    """
    tags = ("<think>", "</think>")
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(tags if are_special else ()))
    roles: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = made_tokenizer(Shape(TEMPLATE, special, roles))
    if not are_special:
        tokenizer.add_tokens(list(tags))
    return tokenizer
