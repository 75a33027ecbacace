"""The layout of micro-batches that the networks support: padded rows, or packed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vapo.errors import UserError
from vapo.networks.adapters import AdaptersForSequenceClassification
from vapo.networks.packed_attention import PACKED_SDPA
from vapo.networks.probe import ProbeForSequenceClassification
from vapo.networks.token_inputs import Layout
from vapo.system.private_attributes import attention_implementation, can_change_attention


def choose_layout(
    option: Literal["auto", "padded", "packed", "shared_prompts"],
    models: Sequence[PreTrainedModel],
) -> Layout:
    """Choose the layout of micro-batches, and if they are packed, enable it in every network.

    A probe has none of its own, for it reads no tokens, nor have adapters: theirs is the base's.

    Raises: UserError: the layout asked for is one that a network does not support.
    """
    if option == "padded":
        return "padded"
    without = ProbeForSequenceClassification | AdaptersForSequenceClassification
    models = [m for m in models if not isinstance(m, without)]
    not_packed = next((r for r in map(why_not_packed, models) if r is not None), None)
    not_shared = next((r for r in map(why_not_shared, models) if r is not None), None)
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


def why_not_packed(model: PreTrainedModel) -> str | None:
    """The reason why a network does not support packed rows; None if it does."""
    name = type(model).__name__
    if not can_change_attention(model):
        return f"{name} computes attention without Transformers' AttentionInterface"
    implementation = attention_implementation(model)
    if implementation not in ("sdpa", "flash_attention_2", PACKED_SDPA):
        return f"attn_implementation {implementation} supports padded rows only"
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers):
        return f"not every layer of {name} has full attention"
    return None


def why_not_shared(model: PreTrainedModel) -> str | None:
    """The reason why a network cannot compute a prompt once for its responses; None if it can."""
    if attention_implementation(model) == "flash_attention_2":
        return "attn_implementation flash_attention_2 supports rows without shared prompts only"
    return why_not_packed(model)


def enable_packing(model: PreTrainedModel) -> None:
    """Let a network take packed rows; its forward pass of padded rows is unchanged."""
    if attention_implementation(model) == "sdpa":
        model.set_attn_implementation(PACKED_SDPA)
