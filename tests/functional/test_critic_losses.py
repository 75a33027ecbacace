"""The losses of the critics of 2026 (DIS, DPPO, cross-entropy, weights) against their numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import equal, f64, gradient, mask
from vapo.functional.losses import (
    aggregate,
    categorical_value_loss,
    value_loss,
)
from vapo.functional.surrogates import dis_surrogate, dppo_surrogate
from vapo.functional.value_heads import hl_gauss_targets, two_hot_targets

NAN, INF = float("nan"), float("inf")
REASONING: dict[str, Any] = {"eps_low": 0.3, "eps_high": 5.0}
CODING: dict[str, Any] = {"eps_low": 0.8, "eps_high": 3.0}
bounded = settings(max_examples=30, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dis_rejects_the_bounds_themselves(dtype: torch.dtype) -> None:
    """SAO's numbers: r = 0.7, 0.8, 2, 6; f = 0, 0.8, 2, 0; A = 1, log pi = -ln 2."""
    new = torch.full((1, 4), -math.log(2), dtype=dtype).requires_grad_()
    rollout = new.detach() - f64([0.7, 0.8, 2, 6]).log().to(dtype)
    losses = dis_surrogate(new, rollout, torch.ones(1, 4, dtype=dtype), **REASONING)
    weights = torch.tensor([[0, 0.8, 2, 0]], dtype=dtype)
    equal(losses.detach(), weights * math.log(2), atol=1e-6)
    loss = aggregate(losses, mask("xxxx"), reduction="token_mean")  # over rejected tokens too
    assert loss.item() == pytest.approx(2.8 * math.log(2) / 4, abs=1e-6)
    assert round(loss.item(), 3) == 0.485
    equal(gradient(losses, new), -weights, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_dis_has_one_band_for_both_signs(sign: float) -> None:
    """For code 0.2 < r < 4: a ratio outside is dropped, not clamped, whatever the advantage."""
    new = f64([-1, -1, -1, -1]).requires_grad_()
    rollout = new.detach() - f64([0.19, 0.21, 3.99, 4.01]).log()
    losses = dis_surrogate(new, rollout, sign * f64([1, 2, 3, 4]), **CODING)
    equal(gradient(losses, new), -sign * f64([0, 0.42, 11.97, 0]))


@bounded
@given(seeds, st.floats(0.05, 0.95), st.floats(0.05, 9.0))
def test_the_gradient_of_dis_is_the_ratio_times_the_advantage_inside_the_band(
    seed: int, eps_low: float, eps_high: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logs, rollout, advantages = torch.randn(3, 4, 6, generator=draw, dtype=torch.float64)
    new = logs.requires_grad_()
    losses = dis_surrogate(new, rollout, advantages, eps_low=eps_low, eps_high=eps_high)
    ratio = (logs - rollout).exp().detach()
    is_inside = (ratio > 1 - eps_low) & (ratio < 1 + eps_high)
    expected = torch.where(is_inside, -ratio * advantages, 0.0)
    equal(gradient(losses, new), expected)
    equal(losses.detach(), expected * logs.detach())


def test_dppo_masks_what_moves_further_away() -> None:
    """BPCO's numbers (mu, pi, A), delta 0.2: the coefficient of -A is r * M."""
    mu, pi = f64([0.5, 0.05, 0.5, 0.5]), f64([0.75, 0.075, 0.25, 0.75])
    advantages = f64([1, 1, -1, -1])
    new = pi.log().requires_grad_()
    losses = dppo_surrogate(new, mu.log(), advantages, delta=0.2)
    coefficients = f64([0, 1.5, 0, 1.5])
    equal(losses.detach(), -advantages * coefficients)
    equal(gradient(losses, new), -advantages * coefficients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dppo_keeps_the_bound_itself(dtype: torch.dtype) -> None:
    mu, pi = f64([0.5, 0.5, 0.5, 0.5]), f64([0.7, 0.3, 0.7001, 0.2999])
    losses = dppo_surrogate(
        pi.log().to(dtype), mu.log().to(dtype), f64([1, -1, 1, -1]).to(dtype), delta=0.2
    )
    equal(losses, torch.tensor([[-1.4, 0.6, 0, 0]], dtype=dtype), atol=1e-6)


@bounded
@given(seeds, st.floats(0.0, 0.5))
def test_the_gradient_of_dppo(seed: int, delta: float) -> None:
    """-A r M, where log pi and log mu are log-probs of a token: never above 0."""
    draw = torch.Generator().manual_seed(seed)
    logs, rollout, advantages = torch.randn(3, 4, 6, generator=draw, dtype=torch.float64)
    new, rollout = -logs.abs().requires_grad_(), -rollout.abs()
    losses = dppo_surrogate(new, rollout, advantages, delta=delta)
    distance = (new.exp() - rollout.exp()).detach()
    is_kept = torch.where(advantages > 0, distance <= delta, distance >= -delta)
    expected = torch.where(is_kept, -advantages * (new - rollout).exp().detach(), 0.0)
    equal(gradient(losses, new), expected, atol=1e-9)
    equal(losses.detach(), expected, atol=1e-9)
    on_policy = dppo_surrogate(new, new.detach(), advantages, delta=delta)
    equal(on_policy.detach(), -advantages)


def test_dppo_survives_an_exploding_ratio() -> None:
    new = torch.tensor([[200.0, -200.0]], requires_grad=True)
    losses = dppo_surrogate(new, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), delta=0.2)
    assert losses.isfinite().all()
    assert gradient(losses, new).tolist() == [[0.0, 0.0]]


SURROGATES = [
    pytest.param(lambda *x: dis_surrogate(*x, **CODING), id="dis"),
    pytest.param(lambda *x: dppo_surrogate(*x, delta=0.2), id="dppo"),
]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_non_finite_token_shows_unless_masked_out(surrogate: Any, which: int, bad: float) -> None:
    inputs = [f64([-1, -1]), f64([-1, -1]), f64([2, 2])]
    inputs[which][0, 1] = bad
    leaf = inputs[0].requires_grad_()
    losses = surrogate(*inputs)
    assert aggregate(losses, mask("xx"), reduction="token_mean").isnan()
    found = gradient(aggregate(losses, mask("x."), reduction="token_mean"), leaf)
    equal(found, f64([-2, 0]))


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_surrogates_of_bfloat16_are_float32_and_leave_the_other_inputs_alone(
    surrogate: Any,
) -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = -torch.rand(3, 2, 5, generator=draw)
    new, rollout, advantages = (x.bfloat16() for x in numbers)
    leaves = [x.requires_grad_() for x in (new, rollout, advantages)]
    losses = surrogate(*leaves)
    assert losses.dtype == torch.float32
    equal(losses.detach(), surrogate(*(x.detach().float() for x in leaves)), atol=0)
    losses.sum().backward()
    assert new.grad is not None
    assert new.grad.any()
    assert rollout.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize("bounds", [{"eps_low": 0.0}, {"eps_high": -1.0}, {"eps_high": NAN}])
def test_dis_refuses_an_empty_band(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        dis_surrogate(f64([0]), f64([0]), f64([0]), **{**REASONING, **bounds})


@pytest.mark.parametrize("delta", [-0.1, NAN])
def test_dppo_refuses_a_negative_delta(delta: float) -> None:
    with pytest.raises(ValueError, match="delta must be"):
        dppo_surrogate(f64([0]), f64([0]), f64([0]), delta=delta)


def test_cross_entropy_of_two_bins() -> None:
    """Le Critique: y = 0.3 gives -0.7 log p0 - 0.3 log p1."""
    logits = f64([0.2, 0.8]).log()[None].requires_grad_()
    targets = two_hot_targets(f64([0.3]), f64([0, 1])[0])
    loss = categorical_value_loss(logits, targets, mask("x"))
    assert loss.item() == pytest.approx(-0.7 * math.log(0.2) - 0.3 * math.log(0.8), abs=1e-12)
    equal(gradient(loss, logits), f64([0.2 - 0.7, 0.8 - 0.3])[None])


@bounded
@given(seeds, st.sampled_from([NAN, INF, -INF, 999.0]))
def test_cross_entropy_ignores_padding(seed: int, garbage: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    is_token = torch.rand(3, 4, generator=draw) < 0.7
    is_token[0, 0] = True
    logits = torch.randn(3, 4, 5, generator=draw, dtype=torch.float64)
    y = torch.rand(3, 4, generator=draw, dtype=torch.float64)
    targets = hl_gauss_targets(
        y, low=0, high=1, num_bins=5, support="midpoint", sigma_ratio=0.75
    ).requires_grad_()
    losses = -(targets * logits.log_softmax(-1)).sum(-1)
    expected = losses[is_token].sum() / is_token.sum()
    dirty = torch.where(is_token[..., None], logits, garbage).requires_grad_()
    dirty_targets = torch.where(is_token[..., None], targets, garbage)
    loss = categorical_value_loss(dirty, dirty_targets, is_token)
    equal(loss.detach(), expected.detach())
    found = gradient(loss, dirty)
    share = torch.where(is_token[..., None], logits.softmax(-1) - targets, 0.0) / is_token.sum()
    equal(found, share.detach())
    part = categorical_value_loss(dirty, dirty_targets, is_token, denominator=8)
    equal(part.detach(), (expected * is_token.sum() / 8).detach())


def test_cross_entropy_of_bfloat16_is_float32_and_shows_a_broken_token() -> None:
    logits = (
        torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    )
    targets = torch.full((2, 3, 4), 0.25, requires_grad=True)
    loss = categorical_value_loss(logits, targets, mask("xxx", "x.."))
    assert loss.dtype == torch.float32
    loss.backward()
    assert logits.grad is not None
    assert targets.grad is None
    exact = categorical_value_loss(logits.detach().float(), targets, mask("xxx", "x.."))
    equal(loss.detach(), exact, atol=0)
    broken = torch.where(mask("xxx", "x..")[..., None], targets, 0.0)
    broken[1, 0] = NAN
    assert categorical_value_loss(logits, broken, mask("xxx", "x..")).isnan()


def test_token_weights_leave_the_denominator_alone() -> None:
    values, targets = f64([1, 2, NAN], [0, INF, NAN]), f64([0, 4, 7], [3, NAN, 1])
    is_token, weights = mask("xx.", "x.."), f64([2, 0.5, NAN], [3, NAN, 7])
    # (2 * 1 + 0.5 * 4 + 3 * 9) / 2 / 3 tokens
    per_token = value_loss(values, targets, is_token, token_weights=weights)
    assert per_token.item() == pytest.approx(31 / 6, abs=1e-12)
    # one a response: (2 * (1 + 4) + 3 * 9) / 2 / 3
    per_response = value_loss(values, targets, is_token, token_weights=f64([2], [3]))
    assert per_response.item() == pytest.approx(37 / 6, abs=1e-12)
    (found,) = torch.autograd.grad(
        value_loss(values.requires_grad_(), targets, is_token, token_weights=weights), values
    )
    equal(found, f64([2 / 3, -1 / 3, 0], [-3, 0, 0]))
    whole = value_loss(values, targets, is_token, token_weights=f64([2], [3]), denominator=37)
    assert whole.item() == pytest.approx(0.5, abs=1e-12)


def test_token_weights_multiply_the_gradient_and_the_clipped_loss() -> None:
    values = f64([1, 2, NAN]).requires_grad_()
    weights = f64([3]).requires_grad_()
    loss = value_loss(values, f64([0, 4, INF]), mask("xx."), denominator=1, token_weights=weights)
    loss.backward()
    assert values.grad is not None
    equal(values.grad, f64([3, -6, 0]))
    assert weights.grad is None
    clipped = value_loss(
        f64([2, 2]),
        f64([3, 1.9]),
        mask("xx"),
        old_values=f64([0, 0]),
        value_clip=0.5,
        denominator=1,
        token_weights=f64([2, 10]),
    )
    assert clipped.item() == pytest.approx((2 * 6.25 + 10 * 1.96) / 2, abs=1e-12)


@bounded
@given(seeds, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_without_token_weights_the_value_loss_is_what_it_was(seed: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(seed)
    values, targets, old = torch.randn(3, 4, 6, generator=draw).to(dtype)
    is_token = torch.rand(4, 6, generator=draw) < 0.7
    plain = aggregate(0.5 * (values - targets).square(), is_token, reduction="token_mean")
    assert torch.equal(value_loss(values, targets, is_token), plain)
    ones = torch.ones(4, 1, dtype=dtype)
    assert torch.equal(value_loss(values, targets, is_token, token_weights=ones), plain)
    clipped: dict[str, Any] = {"old_values": old, "value_clip": 0.2}
    assert torch.equal(
        value_loss(values, targets, is_token, **clipped, token_weights=ones),
        value_loss(values, targets, is_token, **clipped),
    )


def test_a_head_at_the_mean_reward_opens_at_the_variance() -> None:
    """JustRL-II: V = 0.52 everywhere, rewards 0 and 1 with that mean: 0.52 * 0.48 = 0.2496."""
    targets = torch.tensor([[1.0]] * 13 + [[0.0]] * 12).double()
    values = torch.full_like(targets, 0.52)
    loss = 2 * value_loss(values, targets, torch.ones(25, 1, dtype=torch.bool))
    assert loss.item() == pytest.approx(0.2496, abs=1e-12)
