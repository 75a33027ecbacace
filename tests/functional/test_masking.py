"""What the mask counts, and closing up rows with gaps."""

import pytest
import torch

from tests.builders import mask
from vapo.functional.masking import (
    compact,
    compaction_index,
    is_left_aligned,
    loss_denominator,
    place_at_last_token,
    scatter_back,
    zero_outside,
)

NAN = float("nan")


def test_zero_outside_drops_nan_in_value_and_gradient() -> None:
    x = torch.tensor([[2.0, NAN, float("inf")]], requires_grad=True)
    y = zero_outside(x, mask("x..")) * 3
    y.sum().backward()
    assert y.tolist() == [[6.0, 0.0, 0.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 0.0, 0.0]]


def test_loss_denominator_does_not_count_rows_without_tokens() -> None:
    m = mask("xx.x", "....", "x...")
    assert loss_denominator(m, reduction="token_mean").item() == 4
    assert loss_denominator(m, reduction="sequence_mean").item() == 2


def test_reward_goes_to_the_last_sampled_token() -> None:
    rewards = torch.tensor([1.0, -1.0, 0.5])
    actual = place_at_last_token(rewards, mask("xxxx", ".xx.", "...."))
    assert actual.tolist() == [[0, 0, 0, 1], [0, 0, -1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("row", "expected"),
    [("xxx", True), ("x..", True), ("...", True), (".xx", False), ("x.x", False), ("..x", False)],
)
def test_is_left_aligned(row: str, expected: bool) -> None:
    assert is_left_aligned(mask(row)) is expected
    assert is_left_aligned(mask("xx.", row)) is expected


def test_compact_and_back() -> None:
    x = torch.tensor([[NAN, 1.0, NAN, 2.0, 3.0], [4.0, NAN, NAN, 5.0, NAN]])
    m = mask(".x.xx", "x..x.")
    index = compaction_index(m)
    closed = compact(x, index)
    assert closed.tolist() == [[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]]
    assert scatter_back(closed, index).tolist() == [[0, 1, 0, 2, 3], [4, 0, 0, 5, 0]]
