"""Losses and their reduction against numbers worked out by hand."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.builders import equal, f64, mask
from vapo.functional.losses import aggregate, clipped_surrogate, kl_penalty, value_loss

NAN, INF = float("nan"), float("inf")


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    old = torch.zeros(1, 4, dtype=torch.float64)
    new = f64([5, 1.5, 5, 0.5]).log()
    advantages = f64([-1, -1, 1, -2])
    actual = clipped_surrogate(new, old, advantages, eps_low=0.2, eps_high=0.2, dual_clip=3.0)
    # -1 * 5 is held at 3; -1 * 1.5 is not; +1 is clipped at 1.2 as ever; 0.5 is clipped at 0.8
    equal(actual, f64([3.0, 1.5, -1.2, 1.6]))


def test_clipped_surrogate_survives_an_exploding_ratio() -> None:
    new = torch.tensor([[200.0, -200.0]], requires_grad=True)
    loss = clipped_surrogate(
        new, torch.zeros(1, 2), torch.tensor([[-1.0, -1.0]]), eps_low=0.2, eps_high=0.2
    )
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("which", ["logprobs", "old_logprobs", "advantages"])
def test_a_non_finite_token_shows_in_the_loss_unless_masked_out(bad: float, which: str) -> None:
    inputs = {
        "logprobs": f64([-1, -1]),
        "old_logprobs": f64([-1, -1]),
        "advantages": f64([2, 2]),
    }
    inputs[which][0, 1] = bad
    inputs["logprobs"].requires_grad_()
    token_losses = clipped_surrogate(*inputs.values(), eps_low=0.2, eps_high=0.2)
    assert aggregate(token_losses, mask("xx"), reduction="token_mean").isnan()
    loss = aggregate(token_losses, mask("x."), reduction="token_mean")
    loss.backward()
    assert loss.item() == -2.0
    grad = inputs["logprobs"].grad
    assert grad is not None
    equal(grad, f64([-2, 0]))


@pytest.mark.parametrize(
    "bounds",
    [
        {"eps_low": -0.1, "eps_high": 0.2},
        {"eps_low": 0.1, "eps_high": -0.2},
        {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": 1.0},
    ],
)
def test_clipped_surrogate_refuses_bad_bounds(bounds: dict[str, float]) -> None:
    x = f64([0])
    with pytest.raises(ValueError, match="must be"):
        clipped_surrogate(x, x, x, **bounds)


def test_aggregate_with_a_given_denominator() -> None:
    losses, m = f64([1, 3, NAN], [5, NAN, NAN]), mask("xx.", "x..")
    token_mean = aggregate(losses, m, reduction="token_mean", denominator=18)
    sequence_mean = aggregate(losses, m, reduction="sequence_mean", denominator=torch.tensor(4))
    assert token_mean.item() == 0.5  # 9 / 18
    assert sequence_mean.item() == 1.75  # (2 + 5) / 4


def test_a_response_without_loss_tokens_adds_nothing_and_is_not_counted() -> None:
    losses = f64([1, 3], [NAN, 9], [4, NAN])
    m = mask("xx", "..", "x.")
    assert aggregate(losses, m, reduction="sequence_mean").item() == 3.0  # (2 + 4) / 2
    assert aggregate(losses, m, reduction="sequence_mean", denominator=3).item() == 2.0


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("denominator", [None, 0, 5])
def test_aggregate_of_nothing_is_zero_with_zero_gradient(reduction, denominator) -> None:
    losses = f64([NAN, 2]).requires_grad_()
    loss = aggregate(losses, mask(".."), reduction=reduction, denominator=denominator)
    loss.backward()
    assert loss.item() == 0.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.0, 0.0]]


def test_aggregate_refuses_an_unknown_reduction() -> None:
    with pytest.raises(Exception, match="reduction"):
        aggregate(f64([1]), mask("x"), reduction="mean")  # type: ignore[arg-type]


def test_value_loss_has_the_half_and_counts_tokens() -> None:
    values, targets = f64([1, 2, NAN], [0, INF, NAN]), f64([0, 4, 7], [3, NAN, 1])
    # (1 + 4 + 9) / 2 / 3
    actual = value_loss(values, targets, mask("xx.", "x.."))
    assert actual.item() == pytest.approx(14 / 6, abs=1e-12)
    assert value_loss(values, targets, mask("xx.", "x.."), denominator=7).item() == 1.0


def test_value_loss_gradient_is_the_error_and_zero_outside() -> None:
    values = f64([1, 2, NAN]).requires_grad_()
    value_loss(values, f64([0, 4, INF]), mask("xx."), denominator=1).backward()
    assert values.grad is not None
    equal(values.grad, f64([1, -2, 0]))


def test_value_clip_takes_the_worse_of_the_two_errors() -> None:
    # V 2 moved 2 from 0, clipped to 0.5: target 3 -> max(1, 6.25); target 1.9 -> max(.01, 1.96)
    values, old, targets = f64([2, 2, NAN]), f64([0, 0, NAN]), f64([3, 1.9, NAN])
    actual = value_loss(values, targets, mask("xx."), old_values=old, value_clip=0.5, denominator=1)
    assert actual.item() == pytest.approx((6.25 + 1.96) / 2, abs=1e-12)


def test_value_clip_needs_old_values() -> None:
    with pytest.raises(ValueError, match="value_clip"):
        value_loss(f64([1]), f64([1]), mask("x"), value_clip=0.5)


def test_kl_estimators() -> None:
    logprobs, ref = f64([-1, -2]), f64([-1.5, -1])  # d = 0.5, -1
    equal(kl_penalty(logprobs, ref, estimator="k1"), f64([0.5, -1]))
    equal(kl_penalty(logprobs, ref, estimator="k2"), f64([0.125, 0.5]))
    expected = f64([math.exp(-0.5) - 0.5, math.e - 2])
    equal(kl_penalty(logprobs, ref, estimator="k3"), expected)


def expected_gradient(estimator: Literal["k1", "k2", "k3"], logits: Tensor, ref: Tensor) -> Tensor:
    """Of the estimate as a loss, over every token that the policy could sample."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    estimates = kl_penalty(logprobs[:, None], ref[:, None], estimator=estimator)[:, 0]
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * estimates).sum(), logits)
    return gradient


def test_expected_gradient_of_the_kl_estimators_as_losses() -> None:
    """k1's is 0 whatever the policy (why the config refuses it), k2's KL(pi, ref)'s, k3's
    KL(ref, pi)'s."""
    logits, ref = f64([0.3, -1.2, 0.8])[0], f64([-0.5, 0.4, 0.1])[0].log_softmax(0)
    leaf = logits.clone().requires_grad_()
    logprobs = leaf.log_softmax(0)
    forward = (logprobs.exp() * (logprobs - ref)).sum()
    reverse = (ref.exp() * (ref - logprobs)).sum()
    (wanted_k2,) = torch.autograd.grad(forward, leaf, retain_graph=True)
    (wanted_k3,) = torch.autograd.grad(reverse, leaf)
    assert expected_gradient("k1", logits, ref).abs().max() < 1e-15
    equal(expected_gradient("k2", logits, ref), wanted_k2)
    equal(expected_gradient("k3", logits, ref), wanted_k3)
    assert wanted_k2.abs().max() > 0.1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_a_masked_out_nan_has_no_gradient(estimator) -> None:
    logprobs = f64([-1, -INF, NAN]).requires_grad_()
    penalty = kl_penalty(logprobs, f64([-1.5, NAN, -1]), estimator=estimator)
    aggregate(penalty, mask("x.."), reduction="token_mean").backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 0] != 0
