"""Choose the layout of micro-batches that the networks support: padded or packed rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Literal

from transformers import PreTrainedModel

from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.networks.adapters import AdaptersForSequenceClassification
from vapo.networks.attention_windows import ATTENTION_LAYERS
from vapo.networks.packed_attention import PACKED_SDPA
from vapo.networks.probe import ProbeForSequenceClassification
from vapo.networks.recurrent_layers import cache_layers
from vapo.networks.token_inputs import Layout
from vapo.system.private_attributes import attention_implementation, can_change_attention
from vapo.system.process import is_main_process

# Architectures whose layers change the attention mask, which packed rows do not have.
_OWN_MASKS = ("doge",)


def choose_layout(
    option: Literal["auto", "padded", "packed", "shared_prompts"],
    models: Sequence[PreTrainedModel],
) -> Layout:
    """Choose the layout of micro-batches, and if it is a packed one, enable it in every network.

    A probe has no layout, because it reads no tokens. Adapters have that of their base.

    Args:
        option: `training.packing`.
        models: the networks that read tokens, and maybe probes and adapters.

    Raises: UserError: a network does not support the layout that the config names.
    """
    if option == "padded":
        return "padded"
    models = _models_with_layout(models)
    not_packed, not_shared = (
        _first_reason(map(f, models)) for f in (why_not_packed, why_not_shared)
    )
    reason = not_packed if option == "packed" else not_shared
    if reason is not None and option != "auto":
        raise UserError(
            f"training.packing is {option}, but {reason}; set training.packing to auto or padded"
        )
    if not_packed is not None:
        return "padded"
    for model in models:
        enable_packing(model)
    return "packed" if option == "packed" or not_shared is not None else "shared_prompts"


def say_layout(option: str, layout: Layout, models: Sequence[PreTrainedModel]) -> None:
    """Print why `training.packing=auto` has not chosen shared prompts, the layout with the fewest
    tokens. Nothing is printed if it has, or if `option` names a layout."""
    models = _models_with_layout(models)
    reason = _first_reason(map(why_not_packed if layout == "padded" else why_not_shared, models))
    if option == "auto" and reason is not None and is_main_process():
        say(f"training.packing auto: {layout}, since {reason}", file=sys.stderr)


def _models_with_layout(models: Sequence[PreTrainedModel]) -> list[PreTrainedModel]:
    kinds_without_layout = ProbeForSequenceClassification | AdaptersForSequenceClassification
    return [m for m in models if not isinstance(m, kinds_without_layout)]


def _first_reason(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Return the reason why a network does not support packed rows; None: it supports them."""
    name = type(model).__name__
    if any(type(layer) not in ATTENTION_LAYERS for layer in cache_layers(model.config)):
        return f"not every layer of {name} has attention"
    if not can_change_attention(model):
        return f"{name} computes attention without Transformers' AttentionInterface"
    implementation = attention_implementation(model)
    if implementation not in ("sdpa", "flash_attention_2", PACKED_SDPA):
        return f"attn_implementation {implementation} supports padded rows only"
    if model.config.model_type in _OWN_MASKS:
        return f"{name} changes the attention mask in its layers"
    return None


def why_not_shared(model: PreTrainedModel) -> str | None:
    """Return the reason why a network does not support the layout in which responses share one
    computation of their prompt; None: it supports it."""
    if attention_implementation(model) == "flash_attention_2":
        return "attn_implementation flash_attention_2 supports rows without shared prompts only"
    return why_not_packed(model)


def enable_packing(model: PreTrainedModel) -> None:
    """Change a network with SDPA attention in place so that it computes packed rows, too.

    Padded rows are computed as before. Other networks are unchanged.
    """
    if attention_implementation(model) == "sdpa":
        model.set_attn_implementation(PACKED_SDPA)
