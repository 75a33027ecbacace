"""Check in a model's config whether its attention has sliding windows or capped scores.

A layer with a window of w attends to a token itself and the w - 1 tokens before it.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from vapo.errors import UserError
from vapo.system.private_attributes import has_attention

# Layers of Transformers' cache that keep a token's keys and values alone.
ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_WINDOWED, _CHUNKED = "sliding_attention", "chunked_attention"


def check_windows(path: str, config: PreTrainedConfig) -> None:
    """Refuse a config with an invalid sliding window, or with attention that is not supported.

    Attention to chunks of the text and attention to later tokens are not supported.

    Args:
        path: the model's folder, for the error.
        config: the config of the text model.

    Raises: UserError: the error names the key of config.json, and what to set.
    """
    window: Any = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ()
    if window is not None and (type(window) is not int or window < 1):
        raise UserError(
            f"{path}/config.json: sliding_window is {window!r}: give the number of tokens that a "
            "layer attends to, at least 1, or null for all of them"
        )
    if window is None and _WINDOWED in kinds:
        reason = "sliding_window is null"
        if getattr(config, "use_sliding_window", True) is False:
            reason = "use_sliding_window is false"
        raise UserError(
            f"{path}/config.json: layer_types has {_WINDOWED}, and {reason}: give both, or name "
            "these layers full_attention"
        )
    if _CHUNKED in kinds or (not kinds and getattr(config, "attention_chunk_size", None)):
        raise UserError(
            f"{path}: its layers attend to chunks (attention_chunk_size), which is not supported "
            "yet: take a model with full attention or sliding windows"
        )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(
            f"{path}/config.json: use_bidirectional_attention is set, and the states of a policy "
            "and a critic must not depend on later tokens: set it to null"
        )


def has_windows(config: PreTrainedConfig) -> bool:
    """Whether any layer of a text model has a sliding attention window."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None and (
        kinds is None or _WINDOWED in kinds
    )


def num_windowed_layers(config: PreTrainedConfig) -> int:
    """Count the layers of a text model that have a sliding attention window."""
    if not has_windows(config):
        return 0
    kinds: Any = getattr(config, "layer_types", None)
    return int(config.num_hidden_layers if kinds is None else kinds.count(_WINDOWED))


def attention_options(path: str, config: PreTrainedConfig, implementation: str) -> dict[str, Any]:
    """Return the keyword arguments that make Transformers compute a model's attention correctly.

    With `auto` this is Transformers' default, except for capped scores (Gemma 2): those get
    `eager`, because scaled dot-product attention silently ignores the cap.

    Args:
        path: the model's folder, for the error.
        implementation: `attn_implementation` of the actor or the critic.

    Raises: UserError: this implementation would not compute the model's attention, or scores cannot
        be capped by what the config says.
    """
    text_config = config.get_text_config(decoder=True)
    cap = getattr(text_config, "attn_logit_softcapping", None)
    if cap is not None and not 0 < cap < math.inf:
        raise UserError(
            f"{path}/config.json: attn_logit_softcapping is {cap}: give a number above 0, or null "
            "for scores that are not capped"
        )
    if cap is not None and implementation not in ("auto", "eager"):
        raise UserError(
            f"{path}: attn_logit_softcapping is {cap}, which attn_implementation "
            f"{implementation} does not compute here: set attn_implementation to auto or eager"
        )
    if implementation == "flash_attention_2" and has_windows(text_config):
        raise UserError(
            f"{path}: its layers have a sliding window, and not every architecture tells "
            "flash_attention_2 of it: set attn_implementation to auto or sdpa, whose packed rows "
            "are computed by torch's FlashAttention on a GPU"
        )
    if not has_attention(text_config, implementation):
        raise UserError(
            f"{path}: Transformers has no attn_implementation {implementation} of "
            f"{text_config.model_type}: set attn_implementation to auto or eager"
        )
    if cap is not None:
        return {"attn_implementation": "eager"}
    return {} if implementation == "auto" else {"attn_implementation": implementation}
