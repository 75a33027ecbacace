"""Track how many bytes of tensors, real or fake, are alive: the memory of a network's pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from vapo.system.private_attributes import storage_key

ASKS_FOR_DEVICE = torch.ops.prim.device.default
"""The query for a tensor's device: half of all operations on fake tensors, which answer it."""


class MemoryTracker(TorchDispatchMode):
    """Counts the storages made while it is active: `live` now and `peak` at most, in bytes.

    Storages that exist already are not counted. A storage counts until nothing refers to it any
    more, autograd's saved tensors included. An allocator's rounding and caching are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storage_keys: set[int] = set()

    def ignore(self, *tensors: Tensor) -> None:
        """Exclude these tensors from the count, even if operations return them."""
        for tensor in tensors:
            self._watch(tensor, 0)

    # shapes are not checked in these three: they run at every single operation
    @no_type_check
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is ASKS_FOR_DEVICE:
            return args[0].__torch_dispatch__(func, types, args)
        for argument in tree_iter((args, kwargs)):
            if isinstance(argument, Tensor):
                self._watch(argument, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._watch(tensor, None)
        self.peak = max(self.peak, self.live)
        return result

    @no_type_check
    def _watch(self, tensor: Tensor, num_bytes: int | None) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._storage_keys:
            return
        size = storage.nbytes() if num_bytes is None else num_bytes
        self._storage_keys.add(key)
        self.live += size
        weakref.finalize(storage, self._forget, key, size)

    @no_type_check
    def _forget(self, key: int, size: int) -> None:
        self._storage_keys.discard(key)
        self.live -= size
