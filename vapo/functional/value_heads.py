"""Turn a critic head's outputs into values (bounded, or the mean of K bins), and make its targets.

A scalar head's output is the value itself. Values, targets and biases are at least float32, also
for bfloat16 inputs; float64 stays float64. Any shape is accepted, and K bins come last.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.functional.masking import at_least_float32

Support = Literal["midpoint", "inclusive"]
"""Where bins lie in [low, high]: `midpoint`, the centers of K equal bins; `inclusive`, K points
of which the first and the last are low and high, and whose outer bins have no end."""

_BISECTIONS = 200  # they cut an interval of 2e7 down to float64's resolution


def bounded_value(
    z: Float[Tensor, " *shape"], *, low: float | int, high: float | int
) -> Float[Tensor, " *shape"]:
    """Squash a head's output into the range of the rewards.

        V = low + (high - low) * (1/2 + atan(z) / pi)        dV/dz = (high - low) / (pi (1 + z^2))

    Source: BPCO (arXiv 2608.23566; its code has low 0 and high 1). The tails are polynomial: the
    gradient at a value near a bound is small, but not exponentially so as a sigmoid's.
    Units: those of the reward. A bound is reached only by rounding, and never crossed.
    Raises: ValueError when low and high are not finite and ascending.

    >>> bounded_value(torch.tensor([-1.0, 0.0, 1.0]), low=0, high=1)
    tensor([0.2500, 0.5000, 0.7500])
    """
    _check_range(low, high)
    share = 0.5 + torch.atan(at_least_float32(z)) / math.pi
    return (low + (high - low) * share).clamp(low, high)


def categorical_centers(
    *, low: float | int, high: float | int, num_bins: int, support: Support
) -> Float[Tensor, " K"]:
    """Return the value that each bin stands for, ascending, in float32.

        midpoint:   e = linspace(low, high, K + 1), c_k = (e_k + e_{k+1}) / 2
        inclusive:  c = linspace(low, high, K)

    Source: HL-Gauss critics (arXiv 2608.02181), which do not say which of the two: an option,
    without a default. With `midpoint` no value reaches low or high, so that rewards at the ends
    need a padded range ([-0.1, 1.1] for rewards 0 and 1 in EasyPPO's rerun, arXiv 2609.36802).
    Units: those of the reward.
    Raises: ValueError on a bad range, num_bins < 2 or an unknown support.

    >>> categorical_centers(low=0, high=1, num_bins=5, support="midpoint")
    tensor([0.1000, 0.3000, 0.5000, 0.7000, 0.9000])
    """
    return _centers(low, high, num_bins, support).float()


def probe_features(states: Float[Tensor, "n L H"]) -> Float[Tensor, "n L*H"]:
    """Norm each layer's states and join the L layers to one row of features, for a value head.

        z_l = (h_l - mean(h_l)) / sqrt(var(h_l) + 1e-5)        z = [z_1, ..., z_L]

    Source: ours; POISE (arXiv 2605.07579) has a similar probe that values prompts. States grow in
    norm from the first layer to the last, and one learning rate must serve all of them. A linear
    layer on the features can form any weighted mean of the layers.
    Units: none. The mean and variance are over the H channels of a layer, in float32.

    >>> probe_features(torch.tensor([[[0.0, 2.0], [5.0, 5.0]]]))
    tensor([[-1.0000,  1.0000,  0.0000,  0.0000]])
    """
    states = at_least_float32(states)
    return torch.nn.functional.layer_norm(states, states.shape[-1:]).flatten(start_dim=1)


@torch.no_grad()
def hl_gauss_targets(
    value_targets: Float[Tensor, " *shape"],
    *,
    low: float | int,
    high: float | int,
    num_bins: int,
    support: Support,
    sigma_ratio: float | int,
) -> Float[Tensor, "*shape K"]:
    """Spread each value target over the bins as a Gaussian's mass, cut off at the ends.

        p_k = Phi((e_{k+1} - y) / sigma) - Phi((e_k - y) / sigma), divided by sum_k p_k
        sigma = sigma_ratio * bin width

    e are the edges between the bins; with `inclusive` the outer ones are -inf and inf.
    Source: HL-Gauss (arXiv 2403.03950) for critics of language models (2608.02181); sigma_ratio
    0.75 is the usual one, and the authors' settings are not known. They do not say what becomes of
    a target outside [low, high]. As in public code it counts as the nearer end with `midpoint`, and
    keeps its own tail masses with `inclusive`.
    Padding: there is no mask here; a non-finite target gives a row of NaN.
    Raises: ValueError on a bad range, num_bins < 2 or an unknown support, or when sigma_ratio is
    not finite and above 0.
    """
    if not 0 < sigma_ratio < math.inf:
        raise ValueError(f"sigma_ratio must be finite and above 0, got {sigma_ratio}")
    centers = _centers(low, high, num_bins, support)
    width = float(centers[1] - centers[0])
    edges = torch.cat([centers - width / 2, centers[-1:] + width / 2])
    y = _finite_or_nan(value_targets.double())
    if support == "midpoint":
        y = y.clamp(low, high)
    else:
        edges[0], edges[-1] = -math.inf, math.inf
    distances = edges.to(y.device) - y[..., None]
    mass = torch.special.ndtr(distances / (sigma_ratio * width)).diff(dim=-1)
    return (mass / mass.sum(dim=-1, keepdim=True)).to(_result_dtype(value_targets))


@torch.no_grad()
def two_hot_targets(
    value_targets: Float[Tensor, " *shape"], centers: Float[Tensor, " K"]
) -> Float[Tensor, "*shape K"]:
    """Split each value target between the two bins around it, so that their mean is the target.

        c_k <= y <= c_{k+1}:  p_{k+1} = (y - c_k) / (c_{k+1} - c_k), p_k = 1 - p_{k+1}

    With two bins at the ends of the rewards' range it is the target of a Bernoulli value.
    Source: Le Critique (arXiv 2608.16739): two bins at 0 and 1. A target outside the centers:
    the sources differ (one code refuses it); here it counts as the nearer end.
    Padding: there is no mask here; a non-finite target gives a row of NaN.
    Raises: ValueError when the centers are fewer than two, or not ascending.

    >>> two_hot_targets(torch.tensor([0.3]), torch.tensor([0.0, 1.0]))
    tensor([[0.7000, 0.3000]])
    """
    points = _checked_centers(centers).to(value_targets.device)
    y = _finite_or_nan(value_targets.double()).clamp(points[0], points[-1])
    lower = (torch.searchsorted(points, y.contiguous(), right=True) - 1).clamp(0, len(points) - 2)
    share = ((y - points[lower]) / (points[lower + 1] - points[lower]))[..., None]
    targets = y.new_zeros(*y.shape, len(points))
    targets.scatter_(-1, lower[..., None], 1 - share).scatter_(-1, lower[..., None] + 1, share)
    return targets.to(_result_dtype(value_targets))


def categorical_value(
    logits: Float[Tensor, "*shape K"], centers: Float[Tensor, " K"]
) -> Float[Tensor, " *shape"]:
    """Return the mean of the bins under the head's distribution, in float32.

        V = sum_k softmax(z)_k * c_k

    Source: HL-Gauss critics (arXiv 2608.02181). The rollouts' temperature does not apply to the
    head. Equal logits, as of a head that starts at zero, give the middle of the support.
    Units: those of the reward.

    >>> categorical_value(torch.zeros(1, 2), torch.tensor([0.0, 1.0]))
    tensor([0.5000])
    """
    probabilities = at_least_float32(logits).softmax(dim=-1)
    return (probabilities * centers.to(probabilities)).sum(dim=-1)


def bounded_bias(mean_reward: float | int, *, low: float | int, high: float | int) -> float:
    """Return the bias z with which a bounded head of weight 0 gives every state the mean reward p.

        z = tan(pi * ((p - low) / (high - low) - 1/2))

    Source: the inverse of `bounded_value`; a head that starts at the mean reward is JustRL-II's.
    Raises: ValueError on a bad range, or when p is not strictly inside it.

    >>> round(bounded_bias(0.75, low=0, high=1), 6)
    1.0
    """
    _check_range(low, high)
    _check_inside(mean_reward, low, high)
    return math.tan(math.pi * ((mean_reward - low) / (high - low) - 0.5))


def categorical_bias(mean_reward: float | int, centers: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    """Return the biases with which a categorical head of weight 0 values all states at p.

    p is the mean reward.

        b_k = beta * (c_k - (c_1 + c_K) / 2), beta such that sum_k softmax(b)_k * c_k = p

    Source: ours for K > 2. These are the logits of the distribution with mean p that is nearest to
    the uniform one (of greatest entropy). Two bins: b_2 - b_1 = logit((p - c_1) / (c_2 - c_1)).
    Raises: ValueError on bad centers, or when p is not strictly between the first and the last.

    >>> categorical_bias(0.75, torch.tensor([0.0, 1.0]))  # +- ln(3) / 2
    tensor([-0.5493,  0.5493])
    """
    points = _checked_centers(centers)
    low, high = float(points[0]), float(points[-1])
    _check_inside(mean_reward, low, high)
    middle = (low + high) / 2
    x = (points - middle) / (high - low)
    target = (mean_reward - middle) / (high - low)
    min_beta, max_beta = -1e7, 1e7  # the mean grows with beta
    for _ in range(_BISECTIONS):
        beta = (min_beta + max_beta) / 2
        if float(((beta * x).softmax(dim=0) * x).sum()) < target:
            min_beta = beta
        else:
            max_beta = beta
    return ((min_beta + max_beta) / 2 * x).to(_result_dtype(centers))


@torch.no_grad()
def _centers(low: float | int, high: float | int, num_bins: int, support: str) -> Tensor:
    _check_range(low, high)
    if num_bins < 2:
        raise ValueError(f"num_bins must be at least 2, got {num_bins}")
    if support == "inclusive":
        return torch.linspace(low, high, num_bins, dtype=torch.float64)
    if support == "midpoint":
        edges = torch.linspace(low, high, num_bins + 1, dtype=torch.float64)
        return (edges[:-1] + edges[1:]) / 2
    raise ValueError(f"support must be midpoint or inclusive, got {support!r}")


def _check_range(low: float | int, high: float | int) -> None:
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"low and high must be finite, low below high, got {low} and {high}")


def _check_inside(mean_reward: float | int, low: float | int, high: float | int) -> None:
    if not low < mean_reward < high:
        raise ValueError(f"mean_reward must be between {low} and {high}, got {mean_reward}")


def _checked_centers(centers: Tensor) -> Tensor:
    points = centers.double()
    if len(points) < 2 or not bool((points.diff() > 0).all()):
        raise ValueError(f"centers must be two or more ascending values, got {centers.tolist()}")
    return points


def _finite_or_nan(x: Tensor) -> Tensor:
    """Replace infinite targets by NaN. Clamped, a broken target would look like an ordinary one."""
    return torch.where(torch.isfinite(x), x, torch.nan)


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
