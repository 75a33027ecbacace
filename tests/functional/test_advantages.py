"""GAE, returns and whitening against numbers worked out by hand."""

import math

import pytest
import torch

from tests.builders import equal, f64, mask
from vapo.functional.advantages import (
    decoupled_gae,
    gae,
    length_adaptive_lambda,
    monte_carlo_returns,
    whiten,
)

NAN, INF = float("nan"), float("inf")


def test_gae_of_three_tokens() -> None:
    # deltas: 0.9*0.4-0.2 = 0.16, 0.9*0.6-0.4 = 0.14, 1-0.6 = 0.4; decay 0.9*0.5 = 0.45
    # A_2 = 0.4, A_1 = 0.14 + 0.45*0.4 = 0.32, A_0 = 0.16 + 0.45*0.32 = 0.304
    rewards, values = f64([0, 0, 1]), f64([0.2, 0.4, 0.6])
    actual = gae(rewards, values, mask("xxx"), gamma=0.9, lambda_=0.5)
    equal(actual, f64([0.304, 0.32, 0.4]))


def test_gae_runs_over_sampled_tokens_only() -> None:
    # The row of the test above, with two tokens of a tool's answer and padding on both sides.
    rewards = f64([NAN, 0, 7, INF, 0, 1, NAN])
    values = f64([3, 0.2, NAN, -INF, 0.4, 0.6, 9])
    actual = gae(rewards, values, mask(".x..xx."), gamma=0.9, lambda_=0.5)
    equal(actual, f64([0, 0.304, 0, 0, 0.32, 0.4, 0]))


def test_gae_with_one_lambda_per_row() -> None:
    # gamma 1; row 0: lambda 0 gives the deltas; row 1: lambda 1 gives return - value.
    rewards, values = f64([0, 0, 1], [0, 0, 1]), f64([0.2, 0.5, 0.6], [0.2, 0.5, 0.6])
    actual = gae(rewards, values, mask("xxx", "xxx"), gamma=1, lambda_=f64([0], [1]))
    equal(actual, f64([0.3, 0.1, 0.4], [0.8, 0.5, 0.4]))


def test_value_after_the_last_token_is_zero_even_if_the_row_goes_on() -> None:
    rewards, values = f64([0, -1, 5, 5]), f64([0.5, 0.25, 100, 100])
    actual = gae(rewards, values, mask("xx.."), gamma=1.0, lambda_=1.0)
    equal(actual, f64([-1.5, -1.25, 0, 0]))


def test_gae_of_a_row_without_tokens_is_zero() -> None:
    values = f64([NAN, NAN], [0.5, 0.5])
    actual = gae(values, values, mask("..", "x."), gamma=1.0, lambda_=0.9)
    equal(actual, f64([0, 0], [0, 0]))


def test_gae_is_not_differentiated() -> None:
    values = f64([0.1, 0.2]).requires_grad_()
    assert not gae(values, values, mask("xx"), gamma=1.0, lambda_=0.9).requires_grad


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.1, 0.9), (-0.1, 0.9), (1.0, 1.1), (1.0, NAN)])
def test_gae_refuses_discounts_outside_the_unit_interval(gamma: float, lambda_: float) -> None:
    x = f64([0.1])
    with pytest.raises(ValueError, match="must be in"):
        gae(x, x, mask("x"), gamma=gamma, lambda_=lambda_)
    with pytest.raises(ValueError, match="must be in"):
        gae(x, x, mask("x"), gamma=gamma, lambda_=f64([lambda_]))


def test_monte_carlo_returns() -> None:
    rewards = f64([1, 2, 4, NAN], [NAN, 1, NAN, 8])
    actual = monte_carlo_returns(rewards, mask("xxx.", ".x.x"), gamma=0.5)
    equal(actual, f64([3, 4, 4, 0], [0, 5, 0, 8]))


def test_decoupled_gae_with_two_lambdas_below_one() -> None:
    # gamma 1, deltas 0.2, 0.2, 0.4. Policy (0.5): 0.4, 0.4, 0.4.
    # Critic (0.25): A = 0.4, 0.2+0.1 = 0.3, 0.2+0.075 = 0.275; plus values 0.6, 0.4, 0.2.
    rewards, values = f64([0, 0, 1]), f64([0.2, 0.4, 0.6])
    advantages, targets = decoupled_gae(
        rewards, values, mask("xxx"), gamma=1.0, lambda_policy=0.5, lambda_critic=0.25
    )
    equal(advantages, f64([0.4, 0.4, 0.4]))
    equal(targets, f64([0.475, 0.7, 1.0]))


def test_whiten_uses_true_tokens_only() -> None:
    # 1, 3, 5, 7: mean 4, population variance 5
    actual = whiten(f64([1, 3, NAN], [5, INF, 7]), mask("xx.", "x.x"))
    scale = 1 / math.sqrt(5 + 1e-8)
    equal(actual, f64([-3 * scale, -scale, 0], [scale, 0, 3 * scale]))


@pytest.mark.parametrize("rows", ["xx", ".."])
def test_whiten_of_equal_or_no_advantages_is_zero(rows: str) -> None:
    equal(whiten(f64([0.1, 0.1]), mask(rows)), f64([0, 0]))


def test_whiten_with_a_floor_by_hand() -> None:
    # A 1, 3, 5, 7: variance 5. R 10, -10, 10, -10: variance 100. Half of it: 25 above 5; 1/10: 1.
    advantages, returns = f64([1, 3, NAN], [5, INF, 7]), f64([10, -10, NAN], [10, INF, -10])
    m = mask("xx.", "x.x")
    at_half = whiten(advantages, m, returns=returns, floor=0.5)
    scale = 1 / math.sqrt(25 + 1e-8)
    equal(at_half, f64([-3 * scale, -scale, 0], [scale, 0, 3 * scale]))
    plain = whiten(advantages, m)
    assert torch.equal(whiten(advantages, m, returns=returns, floor=0.1), plain)
    assert torch.equal(whiten(advantages, m, returns=returns), plain), "the default: no floor"


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_whiten_is_zero_where_all_returns_are_equal(floor: float) -> None:
    advantages, m = f64([1, 3, NAN], [5, INF, 7]), mask("xx.", "x.x")
    returns = torch.full((2, 3), 0.1, dtype=torch.double)
    returns[0, 2] = 9.0
    assert whiten(advantages, m, returns=returns, floor=floor).abs().max() == 0.0
    other = whiten(advantages, m, returns=returns, floor=floor, needs_contrast=False)
    assert torch.equal(other, whiten(advantages, m)), "advantages of more than the returns"


def test_whiten_with_a_floor_over_two_ranks() -> None:
    """Each rank's returns are equal, and those of both are not."""
    x, returns = f64([1, 3, 8], [5, 2, 7]), f64([10, 10, 0], [-10, -10, -10])
    m = mask("xx.", "xxx")
    whole = whiten(x, m, returns=returns, floor=0.5)
    others = f64([14, -30, 3])[0], torch.stack([(x[1] - 3.6).square().sum(), f64([192])[0, 0]])
    other = iter(others)
    first = whiten(
        x[:1], m[:1], returns=returns[:1], floor=0.5, reduce=lambda sums: sums + next(other)
    )
    assert float(first.abs().max()) > 0
    equal(first, whole[:1])


def test_whiten_over_two_ranks_is_whiten_of_both_rows() -> None:
    x = f64([1, 3, 8], [5, 2, 7])
    m = mask("xx.", "xxx")
    whole = whiten(x, m)
    other_sums = iter([torch.stack([x[1].sum(), m[1].sum()]), (x[1] - 18 / 5).square().sum()])
    first = whiten(x[:1], m[:1], reduce=lambda sums: sums + next(other_sums))
    equal(first, whole[:1])


def test_length_adaptive_lambda_keeps_float64() -> None:
    actual = length_adaptive_lambda(f64([400, 80])[0], alpha=0.05)
    equal(actual, f64([0.95], [0.75]))
