"""Diagnostics against numbers worked out by hand."""

import math

import pytest
import torch

from vapo.functional.metrics import (
    approx_kl,
    clip_fractions,
    explained_variance,
    mean_by_position,
)

NAN, INF = float("nan"), float("inf")


def f64(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[c == "x" for c in row] for row in rows])


def test_explained_variance_by_hand() -> None:
    # R 1, 3, 5, 7: variance 5. R - V: 0, 1, 0, 1: variance 1/4.
    returns, values = f64([1, 3, NAN], [5, 7, 99]), f64([1, 2, 4], [5, 6, INF])
    actual = explained_variance(values, returns, mask("xx.", "xx."))
    assert actual.item() == pytest.approx(0.95, abs=1e-12)


def test_explained_variance_of_a_perfect_an_empty_and_a_harmful_critic() -> None:
    returns, m = f64([1, -1, 1, -1]), mask("xxxx")
    assert explained_variance(returns + 3, returns, m).item() == 1.0
    assert explained_variance(torch.full_like(returns, 0.7), returns, m).item() == 0.0
    assert explained_variance(-returns, returns, m).item() == -3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_explained_variance_is_nan_when_all_returns_are_equal(dtype: torch.dtype) -> None:
    returns = torch.full((7, 11), 0.1, dtype=dtype)
    values = torch.randn(7, 11, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert explained_variance(values, returns, torch.ones(7, 11, dtype=torch.bool)).isnan()
    assert explained_variance(values, values, torch.zeros(7, 11, dtype=torch.bool)).isnan()


def test_explained_variance_survives_a_large_offset() -> None:
    # One pass E[x^2] - E[x]^2 would lose every digit here.
    returns, values = f64([1, 3, 5, 7]) + 1e8, f64([1, 2, 5, 6]) + 1e8
    assert explained_variance(values, returns, mask("xxxx")).item() == pytest.approx(0.95, abs=1e-9)


def test_explained_variance_over_two_ranks() -> None:
    returns, values = f64([1, 3], [5, 7]), f64([1, 2], [5, 6])
    other = iter([f64([2, 12, 1])[0], f64([1 + 9, 0.25 + 0.25])[0]])
    actual = explained_variance(
        values[:1], returns[:1], mask("xx"), reduce=lambda sums: sums + next(other)
    )
    assert actual.item() == pytest.approx(0.95, abs=1e-12)


def test_clip_fractions_count_only_tokens_that_lose_their_gradient() -> None:
    ratio = f64([1.3, 1.3, 0.7, 0.7, 1.25, 1.3])
    advantages = f64([1, -1, -1, 1, 1, 1])
    low, high = clip_fractions(
        ratio.log(), torch.zeros_like(ratio), advantages, mask("xxxxx."), eps_low=0.2, eps_high=0.28
    )
    assert (low.item(), high.item()) == (1, 1)


def test_approx_kl_by_hand() -> None:
    # ratios 2 and 1/2: (2 - 1 - ln 2 + 1/2 - 1 + ln 2) / 2 = 1/4
    logprobs = f64([math.log(2), -math.log(2), NAN])
    actual = approx_kl(logprobs, torch.zeros_like(logprobs), mask("xx."))
    assert actual.item() == pytest.approx(0.25, abs=1e-12)


def test_mean_by_position_counts_sampled_tokens() -> None:
    x = f64([1, NAN, 2, 6, 8, 100], [3, 4, NAN, NAN, NAN, NAN])
    profile = mean_by_position(x, mask("x.xxxx", "xx...."), bin_tokens=2, num_bins=3)
    # row 0 has positions 0..4 with 1, 2 | 6, 8 | 100, row 1 has 0..1 with 3, 4
    assert profile.num_tokens.tolist() == [4, 2, 1]
    assert profile.mean.tolist() == [2.5, 7.0, 100.0]
    assert profile.std.tolist() == pytest.approx([math.sqrt(1.25), 1.0, 0.0], abs=1e-12)
    short = mean_by_position(x, mask("x.xxxx", "xx...."), bin_tokens=2, num_bins=2)
    assert short.num_tokens.tolist() == [4, 2]
