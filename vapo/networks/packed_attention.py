"""Attention that is confined to each of the sequences packed into one row.

A network with packed attention computes with torch's `scaled_dot_product_attention` as before,
until it is called with packed inputs: then each sequence attends causally to itself alone, and a
response beside its prompt to that prompt and itself (`vapo.networks.token_inputs.Segment`).

    CUDA, half precision    torch's variable-length FlashAttention: one kernel for the row
    flash_attention_2       the package's variable-length kernel, called by Transformers, which
                            has no place for a prompt's keys: prompts are not shared
    everything else         one call a segment, and no wasted computation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vapo.networks.first_layers import first_layers, has_plain_layers
from vapo.networks.token_inputs import Segment, TokenInputs
from vapo.system.private_attributes import attention_implementation

PACKED_SDPA = "vapo_packed_sdpa"
# One call of torch costs a CPU as much as so many pairs of tokens, times channels, of its work.
_CALL = 300_000
# On a CPU a call of at most so many pairs of tokens is computed in float32: in half precision
# torch's backward pass took 1 to 3.6 times as long.
_SMALL_ON_CPU = 2**16
_counts_for_gpu = ContextVar("counts_for_gpu", default=False)


def last_hidden_states(model: PreTrainedModel, inputs: TokenInputs) -> Float[Tensor, "rows S H"]:
    """The backbone's hidden states. Padded rows need no mask: later tokens do not affect one."""
    return hidden_states(model, inputs)[-1]


def hidden_states(
    model: PreTrainedModel,
    inputs: TokenInputs,
    layers: Sequence[int] = (),
    *,
    wants_last: bool = True,
) -> Mapping[int, Float[Tensor, "rows S H"]]:
    """The states after these layers of the backbone, and under -1 those after its last norm.

    Those of all layers that are run are kept meanwhile, unless -1 alone is asked for, or one layer
    without it.

    Args:
        wants_last: whether -1 is read; otherwise the layers after those asked for are not run,
            and what is under -1 has no meaning.
    """
    options: dict[str, Any] = {"attention_mask": None}
    if inputs.is_packed:
        options = _packed_options(model, inputs)
    options |= {"input_ids": inputs.input_ids, "use_cache": False}
    others = sorted(set(layers) - {-1})
    backbone: Any = model.base_model
    ending = None
    if others and not wants_last and -1 not in layers and has_plain_layers(backbone):
        last = others.pop()
        backbone, ending = first_layers(backbone, last)
    output = backbone(output_hidden_states=True if others else None, **options)
    found = {-1: output.last_hidden_state} | {n: output.hidden_states[n] for n in others}
    return found if ending is None else found | {last: ending.state}


def _packed_options(model: PreTrainedModel, inputs: TokenInputs) -> dict[str, Any]:
    device, segments = inputs.input_ids.device, inputs.segments
    positions = [torch.arange(n, device=device) + first for n, _, first in segments]
    options: dict[str, Any] = {"position_ids": torch.cat(positions)[None], "attention_mask": None}
    implementation = attention_implementation(model)
    if implementation == PACKED_SDPA:
        # a mask of four dimensions is passed on unchanged: none of [S, S] is made
        options["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        options["packed_row"] = PackedRow(segments, device)
        return options
    if implementation != "flash_attention_2" or any(s.prompt_length for s in segments):
        raise ValueError(f"packed inputs for a network without packed attention: {implementation}")
    row = PackedRow(segments, device)
    return options | {
        "cu_seq_lens_q": row.query_ends,
        "cu_seq_lens_k": row.key_ends,
        "max_length_q": row.most_queries,
        "max_length_k": row.most_keys,
    }


@contextmanager
def counts_for_gpu(enabled: bool = True) -> Iterator[None]:
    """Keep the dtypes of a GPU on a CPU's fake tensors, whose bytes are counted in its place."""
    token = _counts_for_gpu.set(enabled)
    try:
        yield
    finally:
        _counts_for_gpu.reset(token)


def computes_on_cpu(tensor: Tensor) -> bool:
    """Whether a tensor is a CPU's, and does not stand for a GPU's."""
    return tensor.device.type == "cpu" and not _counts_for_gpu.get()


class PackedRow:
    """Which keys the segments of a row attend to. All layers read the same one."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = segments
        self.device = device
        self.most_queries = max(s.length for s in segments)
        self.most_keys = max(s.prompt_length + s.length for s in segments)
        self._masks: dict[Any, Tensor] = {}

    @cached_property
    def query_ends(self) -> Int[Tensor, " bounds"]:
        return self._ends([s.length for s in self.segments])

    @cached_property
    def key_ends(self) -> Int[Tensor, " bounds"]:
        return self._ends([s.prompt_length + s.length for s in self.segments])

    def _ends(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], device=self.device).cumsum(0, dtype=torch.int32)

    @cached_property
    def key_places(self) -> Int[Tensor, " keys"] | None:
        """For the keys of all segments, one after another, their places in the row; a prompt's
        come before each of its responses. None: as they are.
        """
        if not any(s.prompt_length for s in self.segments):
            return None
        places: list[int] = []
        start = 0
        for length, prompt_start, prompt_length in self.segments:
            places += range(prompt_start, prompt_start + prompt_length)
            places += range(start, start + length)
            start += length
        return torch.tensor(places, device=self.device)

    @cached_property
    def groups(self) -> list[tuple[Segment, ...]]:
        """Neighbouring segments: a prompt and what continues it, or one sequence alone."""
        groups: list[tuple[Segment, ...]] = []
        for segment in self.segments:
            if segment.prompt_length > 0:
                groups[-1] += (segment,)
            else:
                groups.append((segment,))
        return groups

    def response_mask(self, segment: Segment, dtype: torch.dtype) -> Tensor:
        """[length, prompt + length], 0 where a token may attend and -inf elsewhere.

        A part of one mask for all: autograd keeps it once, whatever segments and layers there are.
        """
        if dtype not in self._masks:
            prompt = max(s.prompt_length for s in self.segments)
            length = max(s.length for s in self.segments if s.prompt_length)
            may = torch.ones(length, prompt + length, dtype=torch.bool, device=self.device)
            self._masks[dtype] = _additive(may.tril(prompt), dtype)
        whole = self._masks[dtype]
        longest, num_queries = whole.shape[1] - whole.shape[0], segment.length
        return whole[:num_queries, longest - segment.prompt_length : longest + num_queries]

    def group_mask(self, index: int, dtype: torch.dtype) -> Tensor:
        """[S, S] of a whole group: its siblings do not see each other."""
        if (index, dtype) not in self._masks:
            lengths = enumerate(s.length for s in self.groups[index])
            member = torch.tensor([m for m, n in lengths for _ in range(n)], device=self.device)
            may = (member[:, None] == member) | (member == 0)
            self._masks[index, dtype] = _additive(may.tril(), dtype)
        return self._masks[index, dtype]


def _additive(may_attend: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(may_attend.shape, dtype=dtype, device=may_attend.device)
    return zeros.masked_fill(~may_attend, -torch.inf)


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
    """Transformers' attention function: packed if `packed_row` is given, else its own."""
    if packed_row is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):  # then rotary embeddings have made queries float32
        dtype = torch.get_autocast_dtype(device)
    has_kernel = query.is_cuda or _counts_for_gpu.get()
    if has_kernel and dtype in (torch.float16, torch.bfloat16):
        states = (x.to(dtype) for x in (query, key, value))
        return _varlen_flash(*states, scaling=scaling, row=packed_row), None
    return _by_segments(query, key, value, dtype=dtype, scaling=scaling, row=packed_row), None


def _by_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dtype: torch.dtype,
    scaling: float | None,
    row: PackedRow,
) -> Tensor:
    """[1, S, heads, D] of one packed row, one call for each segment or small group."""
    on_cpu = computes_on_cpu(query)
    outputs = []

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Callable[[torch.dtype], Tensor] | None = None
    ) -> None:
        is_small = on_cpu and q.shape[2] * k.shape[2] <= _SMALL_ON_CPU
        computed = torch.promote_types(dtype, torch.float32) if is_small else dtype
        output = scaled_dot_product_attention(
            q.to(computed),
            k.to(computed),
            v.to(computed),
            attn_mask=None if mask is None else mask(computed),
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.to(dtype).transpose(1, 2))

    lengths = [sum(s.length for s in group) for group in row.groups]
    split = (x.split(lengths, dim=2) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):  # every call names its dtype
        for index, (group, q, k, v) in enumerate(zip(row.groups, *split, strict=True)):
            if len(group) == 1:
                attend(q, k, v)
            elif _is_small(group, channels=q.shape[1] * q.shape[3]):
                attend(q, k, v, partial(row.group_mask, index))
            else:
                parts = zip(
                    *(x.split([s.length for s in group], dim=2) for x in (q, k, v)), strict=True
                )
                prompt_q, prompt_k, prompt_v = next(parts)
                attend(prompt_q, prompt_k, prompt_v)
                for segment, (own_q, own_k, own_v) in zip(group[1:], parts, strict=True):
                    keys = torch.cat([prompt_k, own_k], dim=2)
                    values = torch.cat([prompt_v, own_v], dim=2)
                    attend(own_q, keys, values, partial(row.response_mask, segment))
    return torch.cat(outputs, dim=1)


def _is_small(group: Sequence[Segment], *, channels: int) -> bool:
    """Whether one call that masks siblings costs less than a call for each of them."""
    needed = sum(s.length * (s.prompt_length + s.length) for s in group)
    masked = sum(s.length for s in group) ** 2 - needed
    return masked * channels < _CALL * (len(group) - 1)


def _varlen_flash(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, row: PackedRow
) -> Tensor:
    """[1, S, heads, D] of one packed row, by torch's variable-length FlashAttention.

    Its causal mask is aligned to a segment's last query and last key, so that a response's first
    token attends to all of its prompt.
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if row.key_places is not None:
        k, v = k[row.key_places], v[row.key_places]
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    if _counts_for_gpu.get():  # in a GPU's place: as many bytes are kept, values do not matter
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
    output = varlen_attn(
        q,
        k,
        v,
        row.query_ends,
        row.key_ends,
        row.most_queries,
        row.most_keys,
        window_size=(-1, 0),  # causal
        **options,
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)
