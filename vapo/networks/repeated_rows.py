"""Read rows of a tensor at several places, with a gradient that sorts nothing on a GPU."""

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
    """An index that reads rows of a tensor, each row once or several times (`select`).

    Packed attention reads the keys and values of a shared prompt once for each response, with the
    same index in every layer. Autograd's own gradient would sort the index on the GPU for each
    tensor. Here it is sorted once, on the host. Gradients are summed in float32, whatever their
    dtype, and always in one order.

    Args:
        places: for each row of the result, which is called a place, the number of the row to read.
        device: the device of the tensors.
    """

    def __init__(self, places: NDArray[Any], device: torch.device) -> None:
        order = np.argsort(places, kind="stable")
        counts = np.bincount(places)
        first = counts.cumsum() - counts
        repeated_rows = np.flatnonzero(counts > 1)
        repeats = np.arange(1, max(counts.max(), 2))
        is_place = repeats < counts[repeated_rows, None]
        other_places = np.where(is_place, first[repeated_rows, None] + repeats, 0)

        def to_tensor(numbers: NDArray[Any]) -> Tensor:
            return on_device(torch.tensor(numbers), device)

        self.places = to_tensor(places)
        self.first = to_tensor(order[first])  # for each row one place where it is read
        self.repeated_rows = to_tensor(repeated_rows)  # rows that are read more than once
        self.other_places = to_tensor(order[other_places])  # the other places of those rows
        # rows are not repeated equally often, so only some of `other_places` are real
        self.is_place = to_tensor(is_place)

    def select(self, rows: Float[Tensor, "S heads D"]) -> Float[Tensor, "places heads D"]:
        """Return the rows in the order of the index, repeated where the index repeats them."""
        place_rows: Tensor = _ReadRows.apply(rows, self)
        return place_rows

    def sums(self, place_rows: Float[Tensor, "places heads D"]) -> Float[Tensor, "S heads D"]:
        """Return for each row the sum of the selected rows that were read from it.

        This is the gradient of `select`.
        """
        total = place_rows.index_select(0, self.first)
        repeats = place_rows.index_select(0, self.other_places.flatten())
        sum_dtype = torch.promote_types(place_rows.dtype, torch.float32)
        repeats = repeats.unflatten(0, self.other_places.shape).to(sum_dtype)
        repeats.masked_fill_(~self.is_place[:, :, None, None], 0.0)
        repeated_sums = total.index_select(0, self.repeated_rows).to(sum_dtype) + repeats.sum(dim=1)
        return total.index_copy_(0, self.repeated_rows, repeated_sums.to(place_rows.dtype))


class _ReadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, place_index: RepeatedRows) -> Tensor:
        ctx.place_index = place_index
        return rows.index_select(0, place_index.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        place_index: RepeatedRows = ctx.place_index
        return place_index.sums(gradient), None
