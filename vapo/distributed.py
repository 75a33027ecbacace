"""Sums and maxima over all ranks; the identity when there is one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    if world_size() == 1:
        return tensor
    moved = tensor.detach().to(_device(), copy=True)
    dist.all_reduce(moved, op=op)
    return moved.to(tensor.device)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The tensor summed over all ranks, on the tensor's own device."""
    return _all_reduce(tensor, dist.ReduceOp.SUM)


def max_over_ranks(tensor: Tensor) -> Tensor:
    return _all_reduce(tensor, dist.ReduceOp.MAX)


def gather_over_ranks(tensor: Tensor) -> Tensor:
    """Rows of all ranks, concatenated along the first dimension; ranks may differ in length."""
    if world_size() == 1:
        return tensor
    gathered: list[Tensor] = [torch.empty(0)] * world_size()
    dist.all_gather_object(gathered, tensor.cpu())
    return torch.cat(gathered).to(tensor.device)
