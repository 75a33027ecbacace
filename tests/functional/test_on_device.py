"""Copies to a GPU, on a stand-in: there is none where the tests run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vapo.functional.columns import on_device


def test_a_tensor_that_repeats_its_memory_is_filled_in_before_it_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pinning writes through the tensor's strides, which must not lead twice to one place."""
    moved: list[tuple[bool, Any, bool]] = []

    def pinned(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def to(tensor: Tensor, device: Any, *, non_blocking: bool = False) -> Tensor:
        moved.append((tensor.is_contiguous(), device, non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "to", to)
    gpu = torch.device("cuda")
    column = torch.tensor([[1.0], [2.0]])
    for tensor in (column.expand(2, 3), torch.arange(6.0).view(2, 3)[:, :2], torch.zeros(0)):
        assert torch.equal(on_device(tensor, gpu), tensor)
    assert moved == [(True, gpu, True)] * 3
