"""Reads rows of a tensor at several places, with a gradient that sorts nothing on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from vapo.functional.columns import on_device


class RepeatedRows:
    """The places at which the rows of a tensor are read: each row at least once.

    Autograd's own gradient sorts the places on a GPU for each tensor that is read, and a network
    with packed attention reads two tensors in each layer. The places are the same for all of them,
    so they are sorted once, on the host. Gradients are summed in float32, whatever their dtype,
    and always in one order.

    Args:
        places: for each place the number of the row that is read there.
        device: the device of the tensors.
    """

    def __init__(self, places: NDArray[Any], device: torch.device) -> None:
        order = np.argsort(places, kind="stable")
        counts = np.bincount(places)
        first = counts.cumsum() - counts
        repeated = np.flatnonzero(counts > 1)
        more = np.arange(1, max(counts.max(), 2))
        is_place = more < counts[repeated, None]
        others = np.where(is_place, first[repeated, None] + more, 0)

        def moved(numbers: NDArray[Any]) -> Tensor:
            return on_device(torch.tensor(numbers), device)

        self.places = moved(places)
        self.first = moved(order[first])  # of each row one place where it is read
        self.repeated = moved(repeated)  # rows that are read more than once
        self.others = moved(order[others])  # the other places of these
        self.is_place = moved(is_place)  # of `others`, for the rows are not repeated equally often

    def of(self, rows: Float[Tensor, "S heads D"]) -> Float[Tensor, "places heads D"]:
        """Return the row of each place."""
        read: Tensor = _Reading.apply(rows, self)
        return read

    def sums(self, read: Float[Tensor, "places heads D"]) -> Float[Tensor, "S heads D"]:
        """Return for each row the sum over the places where it is read."""
        total = read.index_select(0, self.first)
        more = read.index_select(0, self.others.flatten())
        wide = torch.promote_types(read.dtype, torch.float32)
        more = more.unflatten(0, self.others.shape).to(wide)
        more.masked_fill_(~self.is_place[:, :, None, None], 0.0)
        of_repeated = total.index_select(0, self.repeated).to(wide) + more.sum(dim=1)
        return total.index_copy_(0, self.repeated, of_repeated.to(read.dtype))


class _Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, repeated: RepeatedRows) -> Tensor:
        ctx.repeated = repeated
        return rows.index_select(0, repeated.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        repeated: RepeatedRows = ctx.repeated
        return repeated.sums(gradient), None
