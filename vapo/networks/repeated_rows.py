"""Rows of a tensor that are read at several places, and their gradient without sorting."""

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
    """Which rows are read, some of them more than once; of every row at least one place is.

    Autograd's own gradient of such a reading sorts the places anew for each tensor that is read,
    on a GPU, where a network with packed attention reads two in each layer. The places are the
    same for all of them, so that they are sorted once, on the host. The sums are float32, whatever
    the gradient's dtype, and always in one order.

    Args:
        places: of each row that is read, where it stands.
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
        """The rows at all places."""
        read: Tensor = _Reading.apply(rows, self)
        return read

    def sums(self, read: Float[Tensor, "places heads D"]) -> Float[Tensor, "S heads D"]:
        """For each row the sum over the places where it is read."""
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
