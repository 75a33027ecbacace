"""Rows that are read at several places: what is read, and how its gradient comes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from vapo.networks.packed_attention import PackedRow
from vapo.networks.repeated_rows import RepeatedRows
from vapo.networks.token_inputs import Segment

CPU = torch.device("cpu")


def rows_of(numbers: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """[S, 1 head, 1 channel]"""
    return torch.tensor(numbers, dtype=dtype)[:, None, None]


def test_each_row_gets_the_gradients_of_all_its_places() -> None:
    repeated = RepeatedRows(np.array([0, 1, 0, 2, 0]), CPU)
    rows = rows_of([10.0, 20.0, 30.0]).requires_grad_()
    read = repeated.select(rows)
    assert read.flatten().tolist() == [10.0, 20.0, 10.0, 30.0, 10.0]
    (gradient,) = torch.autograd.grad(read, rows, rows_of([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert gradient.flatten().tolist() == [1.0 + 4.0 + 16.0, 2.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_keys_of_shared_prompts_as_by_plain_indexing(dtype: torch.dtype) -> None:
    """Two prompts, of 3 and of 2 responses, and a sequence alone."""
    segments = (
        *(Segment(4), Segment(3, 0, 4), Segment(5, 0, 4), Segment(1, 0, 4)),
        Segment(6),
        *(Segment(2), Segment(3, 19, 2), Segment(4, 19, 2)),
    )
    keys = PackedRow(segments, CPU).keys
    assert keys is not None
    places: list[int] = []
    start = 0
    for length, prompt_start, prompt_length in segments:  # by its definition
        places += range(prompt_start, prompt_start + prompt_length)
        places += range(start, start + length)
        start += length
    assert keys.places.tolist() == places
    torch.manual_seed(0)
    rows = torch.randn(start, 2, 3, dtype=dtype, requires_grad=True)
    weights = torch.randn(len(places), 2, 3, dtype=dtype)
    assert torch.equal(keys.select(rows), rows[places])
    (own,) = torch.autograd.grad(keys.select(rows), rows, weights)
    wide = rows.detach().double().requires_grad_()
    (plain,) = torch.autograd.grad(wide[places], wide, weights.double())
    assert own.dtype == dtype
    if dtype == torch.bfloat16:  # rounded once, after the sum
        assert torch.equal(own, plain.float().bfloat16())
    else:
        torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-6)


def test_sums_are_float32_before_they_are_rounded() -> None:
    """256 + 1 + 1 is 256 where each sum is rounded to bfloat16, and 258 at last."""
    repeated = RepeatedRows(np.array([0, 0, 0]), CPU)
    gradient = repeated.sums(rows_of([256.0, 1.0, 1.0], torch.bfloat16))
    assert gradient.flatten().tolist() == [258.0]
    assert float(rows_of([256.0], torch.bfloat16) + 1 + 1) == 256.0  # the control


def test_without_shared_prompts_nothing_is_read_twice() -> None:
    assert PackedRow((Segment(3), Segment(2)), CPU).keys is None
