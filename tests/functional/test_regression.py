"""A ridge regression from sums alone: by hand, and beside the same regression on all rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vapo.functional.regression import (
    RidgeSolution,
    ridge_of_gram,
    ridge_predictions,
    weighted_gram,
)

X = torch.tensor([[0.0, 5.0], [2.0, 5.0], [4.0, 5.0]])  # the second does not vary
Y = torch.tensor([0.0, 1.0, 5.0])


def fitted(x: Tensor, y: Tensor, w: Tensor, penalty: float) -> RidgeSolution:
    return ridge_of_gram(weighted_gram(x, y, w), penalty=penalty)


def drawn(num: int = 40, size: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(num, size, generator=draw) * torch.tensor([1e-3, 1.0, 1.0, 50.0, 2.0])
    x[:, 2] += 7.0
    y = 0.3 * x[:, 1] - x[:, 2] + torch.randn(num, generator=draw) + 4.0
    return x, y, torch.rand(num, generator=draw) + 0.1


def test_by_hand() -> None:
    """Mean of x 2, variance 8/3; of y 2; covariance 10/3. With penalty 1 the slope is halved."""
    for penalty, slope in ((1e-8, 1.25), (1.0, 0.625)):
        found = fitted(X, Y, torch.ones(3), penalty)
        assert found.weights.tolist() == pytest.approx([slope, 0.0], rel=1e-6)
        assert float(found.intercept) == pytest.approx(2 - 2 * slope, rel=1e-6)
    # residuals 0.5, -1, 0.5 of deviations -2, -1, 3
    assert fitted(X, Y, torch.ones(3), 1e-8).explained == pytest.approx(1 - 1.5 / 14)


def test_a_weight_is_a_number_of_rows_and_parts_add_up() -> None:
    x, y, _ = drawn()
    counts = torch.arange(40) % 3
    repeated = torch.arange(40).repeat_interleave(counts)
    weighted = fitted(x, y, counts.float(), 0.1)
    torch.testing.assert_close(
        weighted.weights, fitted(x[repeated], y[repeated], torch.ones(len(repeated)), 0.1).weights
    )
    parts = [weighted_gram(x[p], y[p], counts[p].float()) for p in (slice(13), slice(13, 40))]
    summed = ridge_of_gram(parts[0] + parts[1], penalty=0.1)
    torch.testing.assert_close(summed.weights, weighted.weights)


def test_it_is_the_regression_on_all_rows_whatever_their_scales() -> None:
    """Least squares of the weighted rows with a row sqrt(penalty * var) for each weight below."""
    x, y, w = (part.double() for part in drawn())
    found = fitted(x, y, w, 0.05)
    share = w / w.sum()
    mean = share @ x
    std = (share @ (x - mean) ** 2).sqrt()
    rows = torch.cat([x - mean, torch.ones(40, 1)], dim=1) * share.sqrt()[:, None]
    below = torch.cat([torch.diag(std) * math.sqrt(0.05), torch.zeros(5, 1)], dim=1)
    targets = torch.cat([y * share.sqrt(), torch.zeros(5)])
    *weights, level = torch.linalg.lstsq(torch.cat([rows, below]), targets[:, None]).solution[:, 0]
    torch.testing.assert_close(found.weights, torch.stack(weights))
    torch.testing.assert_close(found.intercept, level - mean @ torch.stack(weights))
    scaled = fitted(x * 1000, y, w * 7, 0.05)
    torch.testing.assert_close(scaled.weights * 1000, found.weights)
    torch.testing.assert_close(scaled.intercept, found.intercept)


def test_with_weights_of_one_it_is_the_ridge_of_poise() -> None:
    x, y, _ = (part.double() for part in drawn())
    found = fitted(x, y, torch.ones(40, dtype=torch.float64), 0.5)
    rows = x[:3]
    expected = ridge_predictions(x, y, rows, ridge=0.5 * 40)
    torch.testing.assert_close(rows @ found.weights + found.intercept, expected)


def test_equal_targets_are_predicted_and_explained_by_nothing() -> None:
    x, _, w = drawn()
    found = fitted(x, torch.full((40,), 0.7), w, 1e-8)
    assert float((x.double() @ found.weights + found.intercept - 0.7).abs().max()) < 1e-5
    assert math.isnan(found.explained)


def test_more_features_than_rows_are_no_failure() -> None:
    x, y, w = drawn(num=3)
    found = fitted(x, y, w, 1e-3)
    predicted = x.double() @ found.weights + found.intercept
    assert found.weights.isfinite().all()
    torch.testing.assert_close((w * predicted).sum(), (w * y.double()).sum())  # the mean is kept
