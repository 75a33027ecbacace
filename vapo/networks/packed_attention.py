"""Attention that is confined to each of the sequences packed into one row.

A network with packed attention computes with torch's `scaled_dot_product_attention` as before,
until it is called with packed inputs: then each sequence attends causally to itself alone.

    CUDA, half precision    torch's variable-length FlashAttention: one kernel for the row
    flash_attention_2       the package's variable-length kernel, called by Transformers
    everything else         one causal call a sequence: no mask, and no wasted computation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vapo.errors import UserError
from vapo.networks.token_inputs import TokenInputs
from vapo.system.private_attributes import attention_implementation, can_change_attention

PACKED_SDPA = "vapo_packed_sdpa"


def choose_packing(
    option: Literal["auto", "padded", "packed"], models: Sequence[PreTrainedModel]
) -> bool:
    """Choose whether micro-batches are packed, and if so, enable packing in every network.

    Raises: UserError: packing is requested for a network that does not support packed rows.
    """
    if option == "padded":
        return False
    reason = next((r for r in map(why_not_packed, models) if r is not None), None)
    if reason is not None and option == "packed":
        raise UserError(
            f"training.packing is packed, but {reason}; set training.packing to auto or padded"
        )
    if reason is not None:
        return False
    for model in models:
        enable_packing(model)
    return True


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


def enable_packing(model: PreTrainedModel) -> None:
    """Let a network take packed rows; its forward pass of padded rows is unchanged."""
    if attention_implementation(model) == "sdpa":
        model.set_attn_implementation(PACKED_SDPA)


def last_hidden_states(model: PreTrainedModel, inputs: TokenInputs) -> Float[Tensor, "rows S H"]:
    """The backbone's hidden states. Padded rows need no mask: later tokens do not affect one."""
    options: dict[str, Any] = {"attention_mask": None}
    if inputs.is_packed:
        options = _packed_options(model, inputs)
    states: Tensor = model.base_model(
        input_ids=inputs.input_ids, use_cache=False, **options
    ).last_hidden_state
    return states


def _packed_options(model: PreTrainedModel, inputs: TokenInputs) -> dict[str, Any]:
    device, lengths = inputs.input_ids.device, inputs.sequence_lengths
    ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    options: dict[str, Any] = {
        "position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "attention_mask": None,
    }
    if attention_implementation(model) == PACKED_SDPA:
        # a mask of four dimensions is passed on unchanged: none of [S, S] is made
        options["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        options["sequence_lengths"] = lengths
    elif attention_implementation(model) != "flash_attention_2":
        raise ValueError("packed inputs for a network without packed attention")
    return options


def packed_sdpa(
    module: torch.nn.Module,
    query: Float[Tensor, "rows heads S D"],
    key: Float[Tensor, "rows kv_heads L D"],
    value: Float[Tensor, "rows kv_heads L D"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sequence_lengths: Sequence[int] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: packed if `sequence_lengths` is given, else its own."""
    if sequence_lengths is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen_flash(query, key, value, scaling, options), None
    lengths = list(sequence_lengths)
    sequences = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
        for q, k, v in sequences
    ]
    return torch.cat(outputs, dim=1), None


def _varlen_flash(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, options: dict[str, Any]
) -> Tensor:
    """[1, S, heads, D] of one packed row, by torch's variable-length FlashAttention."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    output = varlen_attn(
        q,
        k,
        v,
        options["cu_seq_lens_q"],
        options["cu_seq_lens_k"],
        options["max_length_q"],
        options["max_length_k"],
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)
