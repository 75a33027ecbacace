"""Ridge regressions in closed form, on up to some thousands of rows of features.

Nothing here is differentiated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_NO_VARIANCE = 1e-12  # a variance below this share of the scale is rounding
_COLLINEAR = 1e-6  # a remainder below this share of a feature's square is rounding
_ROWS_AT_ONCE = 4096  # in a Gram matrix: more would take much memory in float64


@torch.no_grad()
def principal_components(
    samples: Float[Tensor, "N F"], rows: Float[Tensor, "B F"], *, count: int
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "B K"]]:
    """Project samples and rows on the `count` directions in which the samples vary most.

    Returns: the K coordinates of each sample, and those of each row. Both are centered by the
    samples' mean. K is smaller than `count` if the samples vary in fewer directions. The signs are
    arbitrary, which does not affect a regression on the components.

    >>> samples = torch.tensor([[0.0, 1.0], [3.0, 1.0], [6.0, 1.0]])
    >>> [x.abs().flatten().tolist() for x in principal_components(samples, samples[:1], count=2)]
    [[3.0, 0.0, 3.0], [3.0]]
    """
    centered = samples - samples.mean(dim=0)
    is_wide = samples.shape[1] > samples.shape[0]
    variances, vectors = torch.linalg.eigh(
        centered @ centered.T if is_wide else centered.T @ centered
    )
    varies = variances > _NO_VARIANCE * variances[-1].clamp(min=torch.finfo(samples.dtype).tiny)
    vectors = vectors[:, varies][:, -count:]
    if is_wide:
        vectors = centered.T @ vectors / variances[varies][-count:].sqrt()
    return centered @ vectors, (rows - samples.mean(dim=0)) @ vectors


@torch.no_grad()
def ridge_predictions(
    samples: Float[Tensor, "N F"],
    targets: Float[Tensor, " N"],
    rows: Float[Tensor, "B F"],
    *,
    ridge: float,
) -> Float[Tensor, " B"]:
    """Predict the targets of rows by a ridge regression that is fitted to samples and `targets`.

        w = (X^T X + ridge I)^-1 X^T (y - mean(y)),    prediction = mean(y) + x w

    X are the samples' features, scaled to mean 0 and variance 1; features that do not vary are 0.
    The intercept is not shrunk. A prediction is held between the least and the largest target.

    >>> samples, targets = torch.tensor([[0.0], [2.0]]), torch.tensor([0.0, 1.0])
    >>> ridge_predictions(samples, targets, torch.tensor([[2.0], [9.0]]), ridge=2.0)
    tensor([0.7500, 1.0000])
    """
    mean, std = samples.mean(dim=0), samples.std(dim=0, correction=0)
    scale = torch.where(std > 0, std, 1.0)
    x, center = (samples - mean) / scale, targets.mean()
    gram = x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(gram, x.T @ (targets - center))
    return (center + (rows - mean) / scale @ weights).clamp(targets.min(), targets.max())


@torch.no_grad()
def weighted_gram(
    features: Float[Tensor, "N F"], targets: Float[Tensor, " N"], weights: Float[Tensor, " N"]
) -> Float[Tensor, "F+2 F+2"]:
    """Sum w z z^T over rows, where z is a row's features, its target and a 1; in float64.

    A regression needs this matrix alone (`ridge_of_gram`), not the rows. The matrix of many rows is
    the sum of those of its parts.

    >>> weighted_gram(torch.tensor([[2.0]]), torch.tensor([3.0]), torch.tensor([0.5]))
    tensor([[2.0000, 3.0000, 1.0000],
            [3.0000, 4.5000, 1.5000],
            [1.0000, 1.5000, 0.5000]], dtype=torch.float64)
    """
    size = features.shape[1] + 2
    gram = torch.zeros(size, size, dtype=torch.float64, device=features.device)
    parts = (x.split(_ROWS_AT_ONCE) for x in (features, targets, weights))
    for chunk, of_target, weight in zip(*parts, strict=True):
        rows = torch.cat([chunk, of_target[:, None], torch.ones_like(of_target)[:, None]], dim=1)
        rows = rows.double()
        gram += rows.T @ (rows * weight.double()[:, None])
    return gram


class RidgeSolution(NamedTuple):
    """The result of `ridge_of_gram`: a fitted regression predicts intercept + features @ weights.

    `explained` is the share of the targets' variance that it explains on the rows that it is fitted
    to; nan if all targets are equal.
    """

    weights: Float[Tensor, " F"]
    intercept: Float[Tensor, ""]
    explained: float


@torch.no_grad()
def ridge_of_gram(gram: Float[Tensor, "J J"], *, penalty: float) -> RidgeSolution:
    """Solve the ridge regression of targets y on J - 2 features x, by their `weighted_gram`.

        minimize  mean (y - b - x w)^2 + penalty * sum_j var(x_j) w_j^2

    The means and variances are weighted by the rows' weights, whose sum must be above 0. So neither
    the scale of a feature nor the number of rows changes a prediction. The intercept b is not
    shrunk, so the mean prediction is the mean target. Features that do not vary have the weight 0.

    >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([0.0, 1.0])
    >>> ridge_of_gram(weighted_gram(x, y, torch.ones(2)), penalty=1.0)[:2]
    (tensor([0.2500], dtype=torch.float64), tensor(0.2500, dtype=torch.float64))
    """
    mean = gram[:-1, -1] / gram[-1, -1]
    squares = gram[:-1, :-1] / gram[-1, -1]
    covariance = squares - mean[:, None] * mean
    variances = covariance.diagonal()
    varies = variances[:-1] > _NO_VARIANCE * squares.diagonal()[:-1]
    std = torch.where(varies, variances[:-1], 1.0).sqrt()
    correlation = torch.where(varies[:, None] & varies, covariance[:-1, :-1], 0.0)
    correlation = correlation / (std[:, None] * std)
    of_target = torch.where(varies, covariance[:-1, -1], 0.0)
    shrunk = correlation + penalty * torch.eye(len(std), dtype=std.dtype, device=std.device)
    scaled_weights = torch.linalg.solve(shrunk, of_target / std)
    weights = scaled_weights / std
    unexplained = (
        variances[-1]
        - 2 * scaled_weights @ (of_target / std)
        + scaled_weights @ correlation @ scaled_weights
    )
    is_constant = variances[-1] <= _NO_VARIANCE * squares[-1, -1]
    explained = math.nan if is_constant else float(1 - unexplained / variances[-1])
    return RidgeSolution(weights, mean[-1] - mean[:-1] @ weights, explained)


def inverse_without_collinear(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Invert the matrix X'X of features X, except for features that are collinear with later ones.

    A feature is collinear if, except for rounding, it is a linear combination of later features:
    less than 1e-6 of its square remains when they are projected out. Its row and column in the
    result are 0.

    >>> inverse_without_collinear(torch.tensor([[4.0, 0.0], [0.0, 0.0]]))
    tensor([[0.2500, 0.0000],
            [0.0000, 0.0000]])
    """
    usable: list[int] = []
    for index in reversed(range(len(matrix))):
        power = rest = matrix[index, index]
        if usable:
            beside = matrix[index, usable]
            rest = power - beside @ torch.linalg.solve(matrix[usable][:, usable], beside)
        if bool(rest > _COLLINEAR * power):
            usable.append(index)
    inverse = torch.zeros_like(matrix)
    if usable:
        block = torch.linalg.inv(matrix[usable][:, usable])
        for row, index in enumerate(usable):
            inverse[index, usable] = block[row]
    return inverse


def two_weights_from_0_to_1(
    matrix: Float[Tensor, "3 3"], target: Float[Tensor, " 3"]
) -> tuple[float, float]:
    """Fit least squares with three features, and return the first two weights, held within [0, 1].

    `matrix` is X'X and `target` is X'y of the features X and targets y. The third weight has no
    bounds. Its best value is a function of the first two, which leaves a problem of two weights. If
    that has its solution outside of [0, 1] x [0, 1], the best solution inside is on an edge.

    >>> two_weights_from_0_to_1(torch.eye(3), torch.tensor([0.5, 2.0, 9.0]))
    (0.5, 1.0)
    """
    free = (inverse_without_collinear(matrix) @ target).tolist()[:2]
    if all(0 <= weight <= 1 for weight in free):
        return free[0], free[1]
    beside, power = matrix[:2, 2], matrix[2, 2]
    factor = beside / power if bool(power > 0) else torch.zeros_like(beside)
    rest = matrix[:2, :2] - torch.outer(factor, beside)
    is_left = rest.diagonal() > _COLLINEAR * matrix.diagonal()[:2]
    rest = rest * torch.outer(is_left, is_left)
    rest_target = (target[:2] - factor * target[2]) * is_left
    edges = [_on_edge(rest, rest_target, index, value) for index in (0, 1) for value in (0.0, 1.0)]

    def loss(weights: tuple[float, float]) -> float:
        w = torch.tensor(weights, dtype=rest.dtype)
        return float(w @ rest @ w - 2 * rest_target @ w)

    return min(edges, key=loss)


def _on_edge(matrix: Tensor, target: Tensor, index: int, value: float) -> tuple[float, float]:
    """Return the two weights of least squares if weight `index` is `value`, and the other weight is
    held within [0, 1]. `matrix` is X'X and `target` is X'y of two features X."""
    other_index = 1 - index
    power = float(matrix[other_index, other_index])
    slope = (
        float(target[other_index] - matrix[other_index, index] * value) / power
        if power > 0
        else 0.0
    )
    weights = [value, value]
    weights[other_index] = min(max(slope, 0.0), 1.0)
    return weights[0], weights[1]
