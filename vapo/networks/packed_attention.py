"""Attention that is confined to each of the sequences packed into one row.

A network with packed attention computes padded inputs with torch's `scaled_dot_product_attention`.
In packed inputs each sequence attends causally to itself alone, and a response with a shared prompt
attends to that prompt and itself (`vapo.networks.token_inputs.Segment`). A layer with a sliding
window attends only to the last tokens of these.

    CUDA, half precision    torch's variable-length FlashAttention: one kernel for the row
    flash_attention_2       the package's variable-length kernel, called by Transformers, which
                            has no place for a prompt's keys: prompts are not shared
    everything else         one call a segment, and no wasted computation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vapo.functional.columns import on_device
from vapo.networks.first_layers import first_layers, has_plain_layers
from vapo.networks.token_inputs import PackedRow, Segment, TokenInputs, blocks
from vapo.system.private_attributes import attention_implementation

PACKED_SDPA = "vapo_packed_sdpa"
# A call of torch costs a CPU as much as this much work, in pairs of tokens times channels.
_CALL_COST = 300_000
# On a CPU a call of at most this many pairs of tokens is computed in float32: in half precision
# torch's backward pass took 1 to 3.6 times as long.
_SMALL_ON_CPU = 2**16
_counts_for_gpu = ContextVar("counts_for_gpu", default=False)
_asks_for_windows = ContextVar("asks_for_windows", default=False)


def last_hidden_states(model: PreTrainedModel, inputs: TokenInputs) -> Float[Tensor, "rows S H"]:
    """Return the backbone's hidden states of all tokens after its last norm.

    Padded rows need no mask, because later tokens do not affect a state.
    """
    return hidden_states(model, inputs)[-1]


def hidden_states(
    model: PreTrainedModel,
    inputs: TokenInputs,
    layers: Sequence[int] = (),
    *,
    wants_last: bool = True,
) -> Mapping[int, Float[Tensor, "rows S H"]]:
    """Return by layer the hidden states of all tokens after the given layers of the backbone.

    Layer 0 is the embedding. The entry -1 has the states after the last norm. During the pass the
    states of all layers are kept in memory, unless only -1 is requested, or only one layer
    without -1.

    Args:
        wants_last: whether the caller reads the entry -1. If not, the layers after the given ones
            are not run where the backbone allows it, and the entry -1 has no meaning.
    """
    options: dict[str, Any] = {"attention_mask": None}
    if inputs.is_packed:
        options = _packed_options(model, inputs)
    options |= {"input_ids": inputs.input_ids, "use_cache": False}
    inner_layers = sorted(set(layers) - {-1})
    backbone: Any = model.base_model
    ending = None
    if inner_layers and not wants_last and -1 not in layers and has_plain_layers(backbone):
        last = inner_layers.pop()
        backbone, ending = first_layers(backbone, last)
    with _windows_for_masks("packed_row" in options):
        output = backbone(output_hidden_states=True if inner_layers else None, **options)
    states = {-1: output.last_hidden_state} | {n: output.hidden_states[n] for n in inner_layers}
    return states if ending is None else states | {last: ending.state}


def _packed_options(model: PreTrainedModel, inputs: TokenInputs) -> dict[str, Any]:
    device, segments = inputs.input_ids.device, inputs.segments
    positions = torch.cat([torch.arange(n) + first for n, _, first in segments])
    options: dict[str, Any] = {"position_ids": on_device(positions[None], device)}
    options["attention_mask"] = None
    implementation = attention_implementation(model)
    if implementation == PACKED_SDPA:
        options["packed_row"] = PackedRow(segments, device)
        return options
    if implementation != "flash_attention_2" or any(s.prompt_length for s in segments):
        raise ValueError(f"packed inputs for a network without packed attention: {implementation}")
    row = PackedRow(segments, device)
    return options | {
        "cu_seq_lens_q": row.query_ends,
        "cu_seq_lens_k": row.key_ends,
        "max_length_q": row.max_queries,
        "max_length_k": row.max_keys,
    }


@contextmanager
def _windows_for_masks(enabled: bool) -> Iterator[None]:
    """Inside the block, if `enabled`, make no real attention masks in forward passes.

    For each kind of layer `packed_mask` then makes a placeholder instead (`window_mask`). The size
    of its last dimension is the layer's sliding window, or 0 if the layer has none. Packed
    attention needs only that size. If `enabled` is False, and outside the block, `packed_mask`
    makes Transformers' own masks.
    """
    token = _asks_for_windows.set(enabled)
    try:
        yield
    finally:
        _asks_for_windows.reset(token)


def packed_mask(*, local_size: int | None = None, **options: Any) -> Tensor | None:
    """Make the attention mask of one kind of layer; Transformers calls this in a forward pass.

    For padded rows it is Transformers' own mask. For packed rows it is a `window_mask` of
    `local_size`, the layer's sliding window. Some architectures do not pass that window to the
    attention function, so it is passed in the mask.
    """
    if not _asks_for_windows.get():
        return sdpa_mask(local_size=local_size, **options)
    return window_mask(local_size)


def window_mask(window: int | None) -> Tensor:
    """Make a mask without values, which passes a layer's window as the size of its last dimension.

    The size 0 stands for no window. A shape can be read without waiting for a device.
    """
    return torch.zeros((1, 1, 1, 1), dtype=torch.uint8).expand(-1, -1, -1, window or 0)


def _window_of(attention_mask: Tensor | None) -> int | None:
    if attention_mask is None or attention_mask.dtype is not torch.uint8:
        raise ValueError(
            "this network makes its attention masks itself, so packed rows would lose what they "
            "mask: set training.packing to padded"
        )
    return attention_mask.shape[-1] or None


@contextmanager
def counts_for_gpu(enabled: bool = True) -> Iterator[None]:
    """Inside the block, compute on a CPU in the dtypes that a GPU would use.

    This is for counting the bytes of fake tensors.
    """
    token = _counts_for_gpu.set(enabled)
    try:
        yield
    finally:
        _counts_for_gpu.reset(token)


def computes_on_cpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a CPU, and does not stand for one on a GPU (`counts_for_gpu`)."""
    return tensor.device.type == "cpu" and not _counts_for_gpu.get()


def packed_sdpa(
    module: torch.nn.Module,
    query: Float[Tensor, "rows heads S D"],
    key: Float[Tensor, "rows kv_heads L D"],
    value: Float[Tensor, "rows kv_heads L D"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_row: PackedRow | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for Transformers, which calls this in each layer.

    With a `packed_row` each sequence of the row attends to itself alone. Without one this is
    Transformers' own SDPA. The result is the output [rows, S, heads, D] and None, because no
    attention weights are returned.
    """
    if packed_row is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    window = _window_of(attention_mask)
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):  # then rotary embeddings have made queries float32
        dtype = torch.get_autocast_dtype(device)
    kernel_options: dict[str, Any] = {"scaling": scaling, "row": packed_row, "window": window}
    has_kernel = query.is_cuda or _counts_for_gpu.get()
    if has_kernel and dtype in (torch.float16, torch.bfloat16):
        return _varlen_flash(*(x.to(dtype) for x in (query, key, value)), **kernel_options), None
    return _by_segments(query, key, value, dtype=dtype, **kernel_options), None


def _by_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dtype: torch.dtype,
    scaling: float | None,
    row: PackedRow,
    window: int | None = None,
) -> Tensor:
    """Compute the attention of one packed row, [1, S, heads, D], by calls of torch's SDPA.

    One call computes a segment, or a block of one if a window is shorter than the segment, or a
    small group of a prompt with its responses.
    """
    on_cpu = computes_on_cpu(query)
    outputs = []

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Callable[[torch.dtype], Tensor] | None = None
    ) -> None:
        is_small = on_cpu and q.shape[2] * k.shape[2] <= _SMALL_ON_CPU
        call_dtype = torch.promote_types(dtype, torch.float32) if is_small else dtype
        output = scaled_dot_product_attention(
            q.to(call_dtype),
            k.to(call_dtype),
            v.to(call_dtype),
            attn_mask=None if mask is None else mask(call_dtype),
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.to(dtype).transpose(1, 2))

    def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> None:
        """Let each query attend to the keys up to its own token, at most `window` of them if set.

        The queries' tokens are the last ones of the keys.
        """
        num_keys, num_before = k.shape[2], k.shape[2] - q.shape[2]
        if window is None or num_keys <= window:
            attend(q, k, v, partial(row.mask, q.shape[2], num_before) if num_before else None)
            return
        for queries, visible in blocks(q.shape[2], num_before, window):
            block, keys = q[:, :, queries], k[:, :, visible]
            mask = partial(row.mask, block.shape[2], keys.shape[2] - block.shape[2], window=window)
            attend(block, keys, v[:, :, visible], mask)

    lengths = [sum(s.length for s in group) for group in row.groups]
    group_tensors = (x.split(lengths, dim=2) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):  # every call names its dtype
        for index, (group, q, k, v) in enumerate(zip(row.groups, *group_tensors, strict=True)):
            if len(group) == 1:
                attend_causally(q, k, v)
            elif _is_small(group, channels=q.shape[1] * q.shape[3]):
                attend(q, k, v, partial(row.group_mask, index, window=window))
            else:
                parts = zip(
                    *(x.split([s.length for s in group], dim=2) for x in (q, k, v)), strict=True
                )
                prompt_q, prompt_k, prompt_v = next(parts)
                attend_causally(prompt_q, prompt_k, prompt_v)
                for response_q, response_k, response_v in parts:
                    keys = torch.cat([prompt_k, response_k], dim=2)
                    values = torch.cat([prompt_v, response_v], dim=2)
                    attend_causally(response_q, keys, values)
    return torch.cat(outputs, dim=1)


def _is_small(group: Sequence[Segment], *, channels: int) -> bool:
    """Whether a group of a prompt and its responses is computed faster in one call.

    One call also computes the pairs of tokens of different responses, which are then masked. The
    alternative is a call for each segment.
    """
    num_needed = sum(s.length * (s.prompt_length + s.length) for s in group)
    num_masked = sum(s.length for s in group) ** 2 - num_needed
    return num_masked * channels < _CALL_COST * (len(group) - 1)


def _varlen_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    row: PackedRow,
    window: int | None = None,
) -> Tensor:
    """Compute the attention of one packed row, [1, S, heads, D], by torch's FlashAttention.

    The kernel's causal mask is aligned to a segment's last query and last key, so that a response's
    first token attends to all of its prompt. Its window does not count the query's own token.
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if row.keys is not None:
        k, v = row.keys.select(k), row.keys.select(v)
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    if _counts_for_gpu.get():  # only bytes count here, and they are the same
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
    # a window that is longer than the kernel's 32 bits limits nothing
    num_left = -1 if window is None or window >= row.max_keys else window - 1
    output = varlen_attn(
        q,
        k,
        v,
        row.query_ends,
        row.key_ends,
        row.max_queries,
        row.max_keys,
        window_size=(num_left, 0),  # causal: no tokens to the right
        **options,
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, packed_mask)
