"""Diagnostics against numbers worked out by hand."""

import math

import pytest
import torch

from tests.builders import f64, mask
from vapo.functional.metrics import (
    advantage_variance_ratio,
    approx_kl,
    calibration,
    clip_fractions,
    explained_variance,
    explained_variance_by_position,
    gradient_noise_ratio,
    mean_by_position,
    mean_of_other_responses,
    value_bias,
)

NAN, INF = float("nan"), float("inf")


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


def test_the_ratio_of_variances_by_hand() -> None:
    # R - V: 0, 2, 0, 2, variance 1. R - B: 1, 1, -1, -3: mean -1/2, variance 11/4.
    returns, values = f64([1, 1, NAN], [0, -2, 99]), f64([1, -1, 4], [0, -4, INF])
    baselines = f64([0, 1])[0]
    actual = advantage_variance_ratio(values, baselines, returns, mask("xx.", "xx."))
    assert actual.item() == pytest.approx(4 / 11, abs=1e-12)


def test_the_ratio_of_variances_is_one_where_the_values_are_the_baseline() -> None:
    returns, baselines = f64([1, 1], [-1, -1], [1, 1]), f64([0.5, -0.2, 0.1])[0]
    values, m = baselines[:, None].expand(3, 2) + 3, mask("xx", "xx", "xx")
    found = advantage_variance_ratio(values, baselines, returns, m)
    assert found.item() == pytest.approx(1.0, abs=1e-12), "a constant shift has no variance"
    perfect = advantage_variance_ratio(returns, baselines, returns, m)
    assert perfect.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ratio_of_variances_is_nan_where_the_baseline_leaves_nothing(
    dtype: torch.dtype,
) -> None:
    returns = torch.tensor([[0.1, 0.1], [0.7, 0.7]], dtype=dtype)
    values, m = torch.tensor([[0.2, 0.4], [0.3, 0.1]], dtype=dtype), mask("xx", "xx")
    assert advantage_variance_ratio(values, returns[:, 0], returns, m).isnan()
    none = advantage_variance_ratio(values, returns[:, 0] + 1, returns, torch.zeros_like(m))
    assert none.isnan()


def test_the_ratio_of_variances_over_two_ranks() -> None:
    returns, values, baselines = f64([1, 1], [0, -2]), f64([1, -1], [0, -4]), f64([0, 1])[0]
    # of the other row: count, sums of R, R - V, R - B; then the squares about R 0, 1 and -1/2
    other = iter([f64([2, -2, 2, -4])[0], f64([0 + 4, 1 + 1, 0.25 + 6.25])[0]])
    actual = advantage_variance_ratio(
        values[:1], baselines[:1], returns[:1], mask("xx"), reduce=lambda sums: sums + next(other)
    )
    assert actual.item() == pytest.approx(4 / 11, abs=1e-12)


def test_the_ratio_of_gradient_noise_by_hand() -> None:
    # p: 1/2, 1, 1/2, 0, so (1 - p)^2: 1/4, 0, 1/4, 1. R - V: 0, 2, 0, 2, mean 1, squares 1.
    # R - B: 1, 1, -1, -3, mean -1/2: squares 9/4, 9/4, 1/4, 25/4.
    returns, values = f64([1, 1, NAN], [0, -2, 99]), f64([1, -1, 4], [0, -4, INF])
    logprobs = f64([0.5, 1, NAN], [0.5, 0, 3]).log()
    baselines = f64([0, 1])[0]
    actual = gradient_noise_ratio(values, baselines, returns, logprobs, mask("xx.", "xx."))
    assert actual.item() == pytest.approx(1.5 / (9 / 16 + 1 / 16 + 25 / 4), abs=1e-12)


def test_values_of_certain_tokens_do_not_change_the_gradients_noise() -> None:
    """The values know everything of two tokens that were certain, and nothing of the others."""
    returns, baselines = f64([1, 1], [-1, -1]), f64([0, 0])[0]
    values, m = f64([0, 1], [0, -1]), mask("xx", "xx")
    logprobs = f64([0.5, 1], [0.5, 1]).log()
    assert advantage_variance_ratio(values, baselines, returns, m).item() == pytest.approx(0.5)
    noise = gradient_noise_ratio(values, baselines, returns, logprobs, m)
    assert noise.item() == pytest.approx(1.0, abs=1e-12)
    certain = torch.zeros_like(values)
    assert gradient_noise_ratio(values, baselines, returns, certain, m).isnan()


def test_the_ratio_of_gradient_noise_over_two_ranks() -> None:
    returns, values, baselines = f64([1, 1], [0, -2]), f64([1, -1], [0, -4]), f64([0, 1])[0]
    # of the other row: count, sums of R, R - V, R - B; then weighted squares about 0, 1 and -1/2
    other = iter([f64([2, -2, 2, -4])[0], f64([0 + 4, 0.25 + 1, 0.0625 + 6.25])[0]])
    columns = values[:1], baselines[:1], returns[:1], f64([0.5, 1]).log()
    actual = gradient_noise_ratio(*columns, mask("xx"), reduce=lambda sums: sums + next(other))
    assert actual.item() == pytest.approx(1.5 / (9 / 16 + 1 / 16 + 25 / 4), abs=1e-12)


def test_the_mean_of_other_responses_by_hand() -> None:
    # A group of 1, 0, 3, whose 3 is not counted, and 5 alone: it has (1 + 0) / 2.
    rewards, groups = f64([1, 0, 3, 5])[0], torch.tensor([0, 0, 0, 1])
    counted = torch.tensor([True, True, False, True])
    found = mean_of_other_responses(rewards, groups, counted=counted)
    assert found.tolist() == [0.0, 1.0, 0.5, 0.5]
    # another rank has two responses, whose rewards add up to 7
    elsewhere = f64([7, 2])[0]
    found = mean_of_other_responses(
        rewards, groups, counted=counted, reduce=lambda sums: sums + elsewhere
    )
    assert found.tolist() == [0.0, 1.0, 0.5, 2.0]
    one = torch.ones(1, dtype=torch.bool)
    assert mean_of_other_responses(rewards[:1], groups[:1], counted=one).isnan().all()


def test_value_bias_by_hand() -> None:
    # V - R: 0.5, 1.5, 1, 1: mean 1. R 1, 1, -1, -1: standard deviation 1, and of R / 2 a half.
    returns, values = f64([1, 1, NAN], [-1, -1, 99]), f64([1.5, 2.5, 4], [0, 0, INF])
    m = mask("xx.", "xx.")
    found = value_bias(values, returns, m)
    assert (found.mean.item(), found.share.item()) == (1.0, 1.0)
    low = value_bias(returns / 2 - 0.25, returns / 2, m)
    assert (low.mean.item(), low.share.item()) == (-0.25, 0.5)
    assert explained_variance(returns - 0.5, returns, m).item() == 1.0, "which does not see it"


def test_value_bias_of_equal_returns_has_no_share() -> None:
    returns, m = torch.full((2, 3), 0.1), torch.ones(2, 3, dtype=torch.bool)
    found = value_bias(returns + 0.25, returns, m)
    assert found.mean.item() == pytest.approx(0.25)
    assert found.share.isnan()
    assert all(x.isnan() for x in value_bias(returns, returns, ~m))


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


def test_explained_variance_by_position_by_hand() -> None:
    # Bin 0 (two tokens each): R 1, 1, 5, 5, errors 0, 0, 2, 2: 1 - 1/4. Bin 1: R 3, 7 and errors
    # 1, -1: 1 - 1/4; the token past the bins is left out. Bin 2 has one return: not defined.
    returns = f64([1, 1, NAN, 3, 4], [5, 5, 7, NAN, NAN])
    values = f64([1, 1, INF, 2, 4], [3, 3, 8, NAN, NAN])
    m = mask("xx.xx", "xxx..")
    found = explained_variance_by_position(values, returns, m, bin_tokens=2, num_bins=3)
    # the first row's fourth token is in bin 1 as well: R 3, 4, 7, errors 1, 0, -1
    var_r = (9 + 16 + 49) / 3 - (14 / 3) ** 2
    assert found[:2].tolist() == pytest.approx([0.75, 1 - (2 / 3) / var_r], abs=1e-12)
    assert found[2].isnan()


def test_explained_variance_of_one_bin_is_that_of_all_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    returns, values = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator)
    m = torch.rand(5, 7, generator=generator) < 0.7
    whole = explained_variance(values, returns, m)
    found = explained_variance_by_position(values, returns, m, bin_tokens=7, num_bins=1)
    assert found.item() == pytest.approx(whole.item(), abs=1e-12)


def test_calibration_by_hand() -> None:
    # Edges 0, 1, 2; 1.0 is in the second bin, and values outside the edges in the end ones.
    values = f64([-5.0, 0.5, NAN], [1.0, 9.0, 0.5])
    returns = f64([2, 2, NAN], [4, 6, -1])
    found = calibration(values, returns, mask("xx.", "xxx"), edges=f64([0, 1, 2])[0])
    assert found.num_tokens.tolist() == [3, 2]
    assert found.num_clusters.tolist() == [2, 1]
    assert found.mean_value.tolist() == pytest.approx([-4 / 3, 5.0])
    assert found.mean_return.tolist() == pytest.approx([1.0, 5.0])
    # bin 0: the first row's residuals sum to 2, the second's to -2: 2/1 * 8 / 3^2
    assert found.standard_error[0].item() == pytest.approx(4 / 3, abs=1e-12)
    assert found.standard_error[1].isnan()


def test_calibration_takes_the_rows_of_a_prompt_as_one_draw() -> None:
    # Four rows of two prompts, one token each: R 1, 1 and 3, 3; residuals -2 and 2 by prompt.
    values, returns = f64([0.5], [0.5], [0.5], [0.5]), f64([1], [1], [3], [3])
    m, edges = torch.ones(4, 1, dtype=torch.bool), f64([0, 1])[0]
    by_prompt = calibration(values, returns, m, edges=edges, cluster_size=2)
    by_row = calibration(values, returns, m, edges=edges)
    assert by_prompt.standard_error.item() == pytest.approx(math.sqrt(2 * 8 / 16), abs=1e-12)
    assert by_row.standard_error.item() == pytest.approx(math.sqrt(4 / 3 * 4 / 16), abs=1e-12)


def test_calibration_over_two_ranks() -> None:
    values, returns = f64([0.2, 0.4], [0.6, 0.8]), f64([1, 2], [3, 6])
    edges, m = f64([0, 1])[0], mask("xx", "xx")
    whole = calibration(values, returns, m, edges=edges)
    # the other rank's count, sum V, sum R; then its squared residual sum and its cluster
    other = iter([f64([2], [1.4], [9]), f64([9], [1])])
    part = calibration(
        values[:1], returns[:1], m[:1], edges=edges, reduce=lambda sums: sums + next(other)
    )
    for a, b in zip(part, whole, strict=True):
        assert a.tolist() == pytest.approx(b.tolist(), abs=1e-12)
