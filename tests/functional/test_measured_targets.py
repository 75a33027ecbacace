"""Value targets of continued states: by hand, and why their weight is the number of draws."""

from __future__ import annotations

from math import comb

import pytest
import torch

from tests.builders import f64
from vapo.functional.baselines import measured_targets
from vapo.functional.losses import categorical_value_loss, value_loss


def test_the_own_return_is_one_more_draw() -> None:
    """Four of mean 0.5 and a return of 1: 3/5. A half of four shared: (2 * 0.5 + 1) / 3."""
    targets, num = measured_targets(f64([1, 1, -1]), f64([0.5, 0.5, 0.25]), f64([4, 2, 0]))
    assert targets.tolist()[0] == pytest.approx([0.6, 2 / 3, -1])
    assert num.tolist() == [[5, 3, 1]]


def test_without_continuations_the_return_stays_bit_for_bit() -> None:
    returns = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    targets, num = measured_targets(returns, torch.ones(3, 50), torch.zeros(3, 50))
    assert torch.equal(targets, returns)
    assert torch.equal(num, torch.ones(3, 50))


@pytest.mark.parametrize("kind", ["squared_error", "cross_entropy"])
def test_the_gradient_is_that_of_the_draws_one_by_one(kind: str) -> None:
    """Returns 1, 0, 0, 1 and the own 1 through one state, beside a token with a return of 0."""
    own, draws = 1.0, [1.0, 0.0, 0.0, 1.0]
    every = [own, *draws, 0.0]

    def loss(z: torch.Tensor, targets: torch.Tensor, **options: object) -> torch.Tensor:
        mask = torch.ones(targets.shape, dtype=torch.bool)
        if kind == "squared_error":
            return value_loss(z, targets, mask, **options)  # type: ignore[arg-type]
        logits = torch.stack([z, -z], dim=-1)
        bins = torch.stack([targets, 1 - targets], dim=-1)
        return categorical_value_loss(logits, bins, mask, **options)  # type: ignore[arg-type]

    one = f64([0.3, -0.2]).requires_grad_()
    targets, num = measured_targets(f64([own, 0.0]), f64([0.5, 0.0]), f64([4, 0]))
    loss(one, targets, token_weights=num, denominator=num.sum()).backward()
    many = f64([0.3, -0.2]).requires_grad_()
    loss(torch.cat([many[:, :1].expand(1, 5), many[:, 1:]], dim=1), f64(every)).backward()
    assert one.grad is not None
    assert many.grad is not None
    assert one.grad.tolist()[0] == pytest.approx(many.grad.tolist()[0], rel=1e-12)


def test_weights_of_the_draws_own_variance_would_bias_the_critic() -> None:
    """p = 0.2, K = 4, over all five outcomes: the mean that a critic of one state converges to."""
    p, k = 0.2, 4
    chances = f64([comb(k, n) * p**n * (1 - p) ** (k - n) for n in range(k + 1)])[0]
    means = f64([n / k for n in range(k + 1)])[0]
    # the own return is independent of the draws: its expectation p stands for it
    targets, num = measured_targets(
        torch.full((1, k + 1), p, dtype=torch.float64),
        means[None],
        torch.full((1, k + 1), float(k), dtype=torch.float64),
    )

    def converged(weights: torch.Tensor, to: torch.Tensor) -> float:
        return float((chances * weights * to).sum() / (chances * weights).sum())

    assert converged(num[0], targets[0]) == pytest.approx(p, abs=1e-12)
    estimated = means * (1 - means) / (k - 1)
    floor = 0.02  # of a variance whose true value is 0.04
    assert converged(1 / (estimated + floor), means) == pytest.approx(0.0841, abs=1e-4)
    assert converged(1 / (estimated + 1e-9), means) == pytest.approx(0.0016 / 0.4112, abs=1e-4)
