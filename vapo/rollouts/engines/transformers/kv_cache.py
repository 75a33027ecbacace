"""The key-value cache of rows that come and go, and the attention of one token to it.

The cache is right-aligned, with room to grow in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    AttentionInterface,
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vapo.networks.packed_attention import PACKED_SDPA, computes_on_cpu
from vapo.system.private_attributes import attention_implementation, can_change_attention

DECODING_SDPA = "vapo_decoding_sdpa"
_MORE_ROOM = 64
_STATES = ("keys", "values")
_STATE_FLAGS = (
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


def prompt_cache(config: PreTrainedConfig, *, is_recurrent: bool) -> DynamicCache:
    """Make an empty cache for the tokens of prompts.

    It keeps the keys and values of all tokens, also in layers with a window, because it knows no
    config. Recurrent layers need one that does.

    Args:
        is_recurrent: the model has recurrent layers (`has_recurrent_layers`).
    """
    return DynamicCache(config=config) if is_recurrent else DynamicCache()


class RoomyLayer(DynamicLayer):
    """A layer of a key-value cache with spare columns, so that a new token copies no old ones.

    `keys` and `values` are views of the columns in use. Every row's last token is in the last
    column in use; the columns left of a shorter row are zero and masked by the caller.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, *, width: int | None = None) -> None:
        """Make a layer from buffers of keys and values, which it keeps and changes.

        The first `width` of their columns are in use; None: all of them are.
        """
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._buffers = [keys, values]
        self._use(width)

    def _use(self, width: int | None) -> None:
        self.keys, self.values = (buffer[:, :, :width] for buffer in self._buffers)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            self._buffers = [
                pad(buffer, (0, 0, 0, key_states.shape[2] + _MORE_ROOM)) for buffer in self._buffers
            ]
        self._buffers[0][:, :, start:end] = key_states
        self._buffers[1][:, :, start:end] = value_states
        self._use(end)
        return self.keys, self.values


class RoomyHybridLayer(LinearAttentionLayer, RoomyLayer):  # type: ignore[misc, override]
    """A cache layer with spare columns for keys and values (`RoomyLayer`), and recurrent states."""

    is_compileable = False

    def __init__(self, keys: Tensor, values: Tensor, *, width: int | None = None) -> None:
        LinearAttentionLayer.__init__(self)
        RoomyLayer.__init__(self, keys, values, width=width)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: keys, values and recurrent states are set when the layer is made."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Raise NotImplementedError: rows are joined by `join_caches`."""
        raise NotImplementedError


class CachedRow:
    """The keys and values of one row's tokens `ids`, kept for the next turn of an episode.

    They are in the row `row` of a cache of several rows, in the columns from `first` on, until
    `detach` copies them.
    """

    def __init__(self, ids: tuple[int, ...], cache: Cache, *, row: int, first: int) -> None:
        self.ids = ids
        self._cache, self._row, self._first = cache, row, first
        self._is_shared = True

    @property
    def num_layers(self) -> int:
        return len(self._cache.layers)

    def states(self, layer: int, name: str) -> Float[Tensor, "heads L d"]:
        """Return the row's keys or values in one layer; `name` is `keys` or `values`."""
        states: Tensor = getattr(self._cache.layers[layer], name)
        return states[self._row, :, self._first : self._first + len(self.ids)]

    def detach(self) -> None:
        """Copy the keys and values, so that the cache of several rows can be freed."""
        if self._is_shared:
            layers: list[Any] = [
                RoomyLayer(*(self.states(i, name)[None].clone() for name in _STATES))
                for i in range(self.num_layers)
            ]
            self._cache, self._row, self._first = Cache(layers=layers), 0, 0
            self._is_shared = False


def aligned_cache(cached_rows: Sequence[CachedRow], lengths: Sequence[int], *, room: int) -> Cache:
    """Make a cache of the first `lengths[r]` tokens of each cached row r, right-aligned.

    The longest row decides how many columns are in use; `room` spare columns follow them.
    """
    width = max(lengths)
    layers: list[Any] = []
    for index in range(cached_rows[0].num_layers):
        buffers = []
        for name in _STATES:
            source = cached_rows[0].states(index, name)
            buffer = source.new_zeros(
                len(cached_rows), source.shape[0], width + room, source.shape[2]
            )
            for row, (cached_row, length) in enumerate(zip(cached_rows, lengths, strict=True)):
                buffer[row, :, width - length : width] = cached_row.states(index, name)[:, :length]
            buffers.append(buffer)
        layers.append(RoomyLayer(*buffers, width=width))
    return Cache(layers=layers)


def join_caches(
    parts: Sequence[tuple[Cache, Int[Tensor, " _"]]], *, width: int, room: int
) -> Cache:
    """Join rows of several caches in one new cache, with `width` columns in use and `room` spare.

    `parts` has each cache with the indices of its rows; an index may come several times (a shared
    prompt). The last `width` columns are kept: the caller guarantees that no row has tokens further
    left. Recurrent states have no columns.
    """
    layers: list[Any] = []
    for index in range(len(parts[0][0].layers)):
        to_join = [(cache.layers[index], rows) for cache, rows in parts]
        first: Any = to_join[0][0]
        has_states, has_keys = (
            isinstance(first, kind) for kind in (LinearAttentionLayer, DynamicLayer)
        )
        if not has_keys:
            layer: Any = LinearAttentionLayer(first.number_of_states)
        else:
            joined = (
                _join(
                    [(getattr(cache_layer, name), rows) for cache_layer, rows in to_join],
                    width,
                    room,
                )
                for name in _STATES
            )
            layer = (RoomyHybridLayer if has_states else RoomyLayer)(*joined, width=width)
        if has_states:
            _join_states(to_join, layer)
        layers.append(layer)
    return Cache(layers=layers)


def _join_states(parts: Sequence[tuple[Any, Int[Tensor, " _"]]], joined: Any) -> None:
    """Fill a new layer of a cache, `joined`, with copies of the recurrent states of rows.

    `parts` has layers of other caches, each with the indices of its rows. All layers are of one
    model, and each row has at least one token, so all layers have states of the same kinds.
    """
    first = parts[0][0]
    joined.number_of_states, joined.device, joined.dtype = (
        first.number_of_states,
        first.device,
        first.dtype,
    )
    for name in _STATE_FLAGS:
        setattr(joined, name, dict(getattr(first, name)))
    for name in ("conv_states", "recurrent_states"):
        states = {
            number: None
            if getattr(first, name)[number] is None
            else torch.cat([getattr(layer, name)[number].index_select(0, r) for layer, r in parts])
            for number in range(first.number_of_states)
        }
        setattr(joined, name, states)


def _join(
    parts: Sequence[tuple[Float[Tensor, "_ heads _ d"], Int[Tensor, " _"]]], width: int, room: int
) -> Float[Tensor, "R heads columns d"]:
    num_rows = sum(len(rows) for _, rows in parts)
    source = parts[0][0]
    joined = source.new_empty(num_rows, source.shape[1], width + room, source.shape[3])
    first = 0
    for states, rows in parts:
        last = first + len(rows)
        num_columns = min(width, states.shape[2])
        recent = states[:, :, states.shape[2] - num_columns :]
        joined[first:last, :, : width - num_columns] = 0  # masked, but 0 * NaN would not be 0
        joined[first:last, :, width - num_columns : width] = recent.index_select(0, rows)
        first = last
    return joined


@contextmanager
def decoding_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, compute a model's scaled dot-product attention by plain products.

    A model with another kind of attention is unchanged. It is for decoding one token at a time:
    Transformers would copy shared keys and values to every head at each token. On a GPU these
    copies grow with each token, so that torch's allocator takes new memory for them and keeps the
    old. On a CPU torch's fused kernel is made for long queries: for the single query of a decoding
    step it takes several times as long as two products, in bfloat16 up to ten times.
    """
    implementation = attention_implementation(model)
    if implementation not in ("sdpa", PACKED_SDPA) or not can_change_attention(model):
        yield
        return
    model.set_attn_implementation(DECODING_SDPA)
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


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
    """Compute attention for Transformers, which calls this in each layer while a model decodes.

    For one query in each row it takes two products, else Transformers' own function. The products
    are in float32, except that on a GPU the product with the values is in their dtype, as in its
    fused kernels. So values in half precision are not copied. The result is the output
    [rows, S, heads, D] and None, because no attention weights are returned.
    """
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
        dtype = torch.float32 if computes_on_cpu(query) else value.dtype
        states = scores.softmax(dim=-1).to(dtype) @ value.to(dtype)
    return states.reshape(num_rows, 1, num_heads, -1).to(query.dtype), None


AttentionInterface.register(DECODING_SDPA, decoding_sdpa)
AttentionMaskInterface.register(DECODING_SDPA, sdpa_mask)
