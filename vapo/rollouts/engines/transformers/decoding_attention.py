"""Attention of one token a row to its cache, on a CPU.

Torch's fused kernel there is made for long queries: for the single query of a decoding step it
takes several times as long as two matrix products, in bfloat16 up to ten times, and Transformers
copies shared keys and values to every head before it calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vapo.networks.packed_attention import PACKED_SDPA
from vapo.system.private_attributes import attention_implementation, can_change_attention

DECODING_SDPA = "vapo_decoding_sdpa"


@contextmanager
def decoding_attention(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """While the model decodes on a CPU with scaled dot-product attention, compute it as above."""
    before = attention_implementation(model)
    is_ours = before in ("sdpa", PACKED_SDPA) and can_change_attention(model)
    if device.type != "cpu" or not is_ours:
        yield
        return
    model.set_attn_implementation(DECODING_SDPA)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def decoding_sdpa(
    module: torch.nn.Module,
    query: Float[Tensor, "rows heads S D"],
    key: Float[Tensor, "rows kv_heads L D"],
    value: Float[Tensor, "rows kv_heads L Dv"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: float32 products for one query, else its own."""
    is_plain = attention_mask is None or attention_mask.dtype == torch.bool
    if query.shape[2] > 1 or not is_plain or options.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    num_rows, num_heads, _, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):
        # The heads that share keys and values are the rows of one product with them.
        grouped = (query.float() * scale).reshape(num_rows, key.shape[1], -1, width)
        scores = grouped @ key.float().transpose(2, 3)
        if attention_mask is not None:
            scores.masked_fill_(~attention_mask, -torch.inf)
        states = scores.softmax(dim=-1) @ value.float()
    return states.reshape(num_rows, 1, num_heads, -1).to(query.dtype), None


AttentionInterface.register(DECODING_SDPA, decoding_sdpa)
AttentionMaskInterface.register(DECODING_SDPA, sdpa_mask)
