"""A regression that is fitted in closed form: what a few thousand rows of features say of others.

Nothing here is differentiated.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_NO_VARIANCE = 1e-12  # a direction with this share of the largest one's variance is rounding


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
