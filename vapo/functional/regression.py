"""A regression that is fitted in closed form: what a few thousand rows of features say of others.

Nothing here is differentiated.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_NO_VARIANCE = 1e-12  # a direction with this share of the largest one's variance is rounding
_COLLINEAR = 1e-9  # less than this share of a feature's square, beside other features, is rounding


@torch.no_grad()
def principal_components(
    known: Float[Tensor, "N F"], rows: Float[Tensor, "B F"], *, count: int
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "B K"]]:
    """Project both on the `count` directions in which the known rows vary most, about their mean.

    K is smaller where the known rows vary in fewer directions. The signs are arbitrary, which a
    regression on the components does not see.

    >>> known = torch.tensor([[0.0, 1.0], [3.0, 1.0], [6.0, 1.0]])
    >>> [x.abs().flatten().tolist() for x in principal_components(known, known[:1], count=2)]
    [[3.0, 0.0, 3.0], [3.0]]
    """
    centered = known - known.mean(dim=0)
    is_wide = known.shape[1] > known.shape[0]
    variances, vectors = torch.linalg.eigh(
        centered @ centered.T if is_wide else centered.T @ centered
    )
    varies = variances > _NO_VARIANCE * variances[-1].clamp(min=torch.finfo(known.dtype).tiny)
    vectors = vectors[:, varies][:, -count:]
    if is_wide:
        vectors = centered.T @ vectors / variances[varies][-count:].sqrt()
    return centered @ vectors, (rows - known.mean(dim=0)) @ vectors


@torch.no_grad()
def ridge_predictions(
    known: Float[Tensor, "N F"],
    targets: Float[Tensor, " N"],
    rows: Float[Tensor, "B F"],
    *,
    ridge: float,
) -> Float[Tensor, " B"]:
    """Predict rows by a ridge regression of the targets on the known ones.

        w = (X^T X + ridge I)^-1 X^T (y - mean(y)),    prediction = mean(y) + x w

    X are the known features with mean 0 and variance 1; those that do not vary are left at 0. The
    intercept is not shrunk. A prediction stays between the least and the largest target.

    >>> known, targets = torch.tensor([[0.0], [2.0]]), torch.tensor([0.0, 1.0])
    >>> ridge_predictions(known, targets, torch.tensor([[2.0], [9.0]]), ridge=2.0)
    tensor([0.7500, 1.0000])
    """
    mean, std = known.mean(dim=0), known.std(dim=0, correction=0)
    scale = torch.where(std > 0, std, 1.0)
    x, center = (known - mean) / scale, targets.mean()
    gram = x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(gram, x.T @ (targets - center))
    return (center + (rows - mean) / scale @ weights).clamp(targets.min(), targets.max())


def inverse_without_collinear(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Invert the features' matrix X'X, with zeros for features that later ones make up exactly.

    From the last feature on, Gauss's elimination leaves of each its square beside those after it.
    Less than 1e-9 of the square is rounding, and such a feature gets no weight.

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
    """Least squares with three features, of which the first two have weights in [0, 1].

    `matrix` is X'X and `target` X'y. The third weight has no bounds. Its best value is a function
    of the others', and leaves a problem in those two alone. If that one's solution is outside the
    square, the best inside is on an edge.

    Returns: the first two weights.

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
    """The best two weights of which one has a given value and the other is within [0, 1]."""
    other = 1 - index
    power = float(matrix[other, other])
    slope = float(target[other] - matrix[other, index] * value) / power if power > 0 else 0.0
    weights = [value, value]
    weights[other] = min(max(slope, 0.0), 1.0)
    return weights[0], weights[1]
