"""The key-value cache of rows that come and go: right-aligned, with room to grow in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

_MORE_ROOM = 64
_STATES = ("keys", "values")


@dataclass(frozen=True)
class CachedRows:
    """Rows of a cache to take over; `rows` may name one row several times (a shared prompt)."""

    cache: Cache
    rows: Int[Tensor, " R"]


class RoomyLayer(DynamicLayer):
    """A layer that writes new tokens into spare columns instead of copying all old ones.

    `keys` and `values` are views of the columns in use. Every row's last token is in the last
    column in use; the columns left of a shorter row are zero and masked by the caller.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, *, width: int | None = None) -> None:
        """Take over two buffers, of whose columns the first `width` are in use; None: all."""
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
                torch.nn.functional.pad(buffer, (0, 0, 0, key_states.shape[2] + _MORE_ROOM))
                for buffer in self._buffers
            ]
        self._buffers[0][:, :, start:end] = key_states
        self._buffers[1][:, :, start:end] = value_states
        self._use(end)
        return self.keys, self.values


class KeptRow:
    """The cache of one row's tokens `ids`, which are in the columns from `first` on.

    It is a view of a cache that several rows share until `detach` copies it.
    """

    def __init__(self, ids: tuple[int, ...], cache: Cache, *, row: int, first: int) -> None:
        self.ids = ids
        self._cache, self._row, self._first = cache, row, first
        self._is_shared = True

    @property
    def num_layers(self) -> int:
        return len(self._cache.layers)

    def states(self, layer: int, name: str) -> Float[Tensor, "heads L d"]:
        """The `keys` or the `values` of a layer."""
        states: Tensor = getattr(self._cache.layers[layer], name)
        return states[self._row, :, self._first : self._first + len(self.ids)]

    def detach(self) -> None:
        """Copy the row, so that the cache that it shares can be freed."""
        if self._is_shared:
            layers: list[Any] = [
                RoomyLayer(*(self.states(i, name)[None].clone() for name in _STATES))
                for i in range(self.num_layers)
            ]
            self._cache, self._row, self._first = Cache(layers=layers), 0, 0
            self._is_shared = False


def aligned_cache(kept: Sequence[KeptRow], lengths: Sequence[int], *, room: int) -> Cache:
    """Make a cache of the first `lengths[r]` tokens of each row, right-aligned, with spare columns.

    As many columns are in use as the longest of them needs.
    """
    width = max(lengths)
    layers: list[Any] = []
    for index in range(kept[0].num_layers):
        buffers = []
        for name in _STATES:
            source = kept[0].states(index, name)
            buffer = source.new_zeros(len(kept), source.shape[0], width + room, source.shape[2])
            for row, (one, length) in enumerate(zip(kept, lengths, strict=True)):
                buffer[row, :, width - length : width] = one.states(index, name)[:, :length]
            buffers.append(buffer)
        layers.append(RoomyLayer(*buffers, width=width))
    return Cache(layers=layers)


def join_caches(parts: Sequence[CachedRows], *, width: int, room: int) -> Cache:
    """Join all parts' rows in one cache, with `width` columns in use and `room` spare ones.

    Columns further left than `width` are dropped: the caller guarantees that no row reaches there.
    """
    layers: list[Any] = []
    for index in range(len(parts[0].cache.layers)):
        keys, values = (
            _join([(getattr(p.cache.layers[index], name), p.rows) for p in parts], width, room)
            for name in _STATES
        )
        layers.append(RoomyLayer(keys, values, width=width))
    return Cache(layers=layers)


def _join(
    parts: Sequence[tuple[Float[Tensor, "_ heads _ d"], Int[Tensor, " _"]]], width: int, room: int
) -> Float[Tensor, "R heads columns d"]:
    num_rows = sum(len(rows) for _, rows in parts)
    source = parts[0][0]
    joined = source.new_empty(num_rows, source.shape[1], width + room, source.shape[3])
    first = 0
    for states, rows in parts:
        last = first + len(rows)
        used = min(width, states.shape[2])
        recent = states[:, :, states.shape[2] - used :]
        joined[first:last, :, : width - used] = 0  # masked, but 0 * NaN would not be 0
        joined[first:last, :, width - used : width] = recent.index_select(0, rows)
        first = last
    return joined
