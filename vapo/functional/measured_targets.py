"""Value targets where a state was continued several times beside the response itself."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


@torch.no_grad()
def measured_targets(
    returns: Float[Tensor, "B T"],
    measured_values: Float[Tensor, "B T"],
    measured_draws: Float[Tensor, "B T"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Put continuations of a state beside the response's own return; how many returns that makes.

        n_t = 1 + k_t                        k_t continuations, of mean M_t
        y_t = (R_t + k_t * M_t) / n_t

    The own return is one more independent draw of V(s_t): y_t has 1/n_t of its variance, and n_t
    is its weight. n_t (V - y_t)^2 is, but for a constant, the sum of (V - draw)^2 over the draws:
    the gradient is that of n_t responses which share the state. Weights by the variance that the
    draws themselves show would bias the critic to the ends: of four draws of 0 or 1 with p = 0.2
    all are 0 with probability 0.41 and all 1 with 0.0016, both of no variance, and a mean with
    such weights is 0.0016 / 0.4112 = 0.004.

    Source: this repository (docs/critics.md).
    Units: those of the reward; draws are numbers of returns, which need not be whole where several
    responses share continuations.
    Padding: where k_t is 0 the return comes back as it is, bit for bit, with 1.

    >>> own, mean, draws = torch.ones(1, 2), torch.tensor([[0.0, 0.5]]), torch.tensor([[0.0, 4.0]])
    >>> measured_targets(own, mean, draws)
    (tensor([[1.0000, 0.6000]]), tensor([[1., 5.]]))
    """
    num = 1 + measured_draws
    pooled = (returns + measured_draws * measured_values) / num
    return torch.where(measured_draws > 0, pooled, returns), num
