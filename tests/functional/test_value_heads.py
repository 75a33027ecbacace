"""Value heads and their targets against the numbers of the papers, and what holds of any."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import equal
from vapo.functional.value_heads import (
    bounded_bias,
    bounded_value,
    categorical_bias,
    categorical_centers,
    categorical_value,
    hl_gauss_targets,
    two_hot_targets,
)

NAN, INF = float("nan"), float("inf")
FIVE: dict[str, Any] = {"low": 0, "high": 1, "num_bins": 5, "sigma_ratio": 0.75}
bounded = settings(max_examples=30, deadline=None, derandomize=True, database=None)
supports = st.sampled_from(["midpoint", "inclusive"])


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def decoded(
    y: float, *, low: float, high: float, num_bins: int, support: Literal["midpoint", "inclusive"]
) -> float:
    """What a head says that has learned the HL-Gauss target of y."""
    options: dict[str, Any] = {"low": low, "high": high, "num_bins": num_bins, "support": support}
    targets = hl_gauss_targets(f64(y), **options, sigma_ratio=0.75)
    return categorical_value(targets.log(), categorical_centers(**options)).item()


def test_bounded_value_and_its_slope() -> None:
    z = f64(0, 1, -1, 3).requires_grad_()
    values = bounded_value(z, low=0, high=1)
    equal(values[:3].detach(), f64(0.5, 0.75, 0.25))
    (slope,) = torch.autograd.grad(values.sum(), z)
    equal(slope, 1 / (math.pi * f64(1, 2, 2, 10)))
    wide = bounded_value(z, low=-1, high=3)
    equal(wide[:2].detach(), f64(1, 2))
    (slope,) = torch.autograd.grad(wide.sum(), z)
    equal(slope, 4 / (math.pi * f64(1, 2, 2, 10)))


@bounded
@given(
    st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=5),
    st.floats(-9, 9),
    st.floats(0.1, 9),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_a_bounded_value_is_inside(
    z: list[float], low: float, width: float, dtype: torch.dtype
) -> None:
    x = torch.tensor([*z, 1e30, -1e30], dtype=dtype)
    values = bounded_value(x, low=low, high=low + width)
    assert values.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    ends = torch.tensor([low, low + width], dtype=values.dtype)
    assert bool(((values >= ends[0]) & (values <= ends[1])).all())
    moderate = values[:-2][x[:-2].abs() < 1e3]
    assert bool(((moderate > ends[0]) & (moderate < ends[1])).all())


def test_centers() -> None:
    midpoint = categorical_centers(low=-1, high=1, num_bins=4, support="midpoint")
    inclusive = categorical_centers(low=-1, high=1, num_bins=5, support="inclusive")
    assert midpoint.tolist() == [-0.75, -0.25, 0.25, 0.75]
    assert inclusive.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert midpoint.dtype == inclusive.dtype == torch.float32


def test_hl_gauss_of_five_bins() -> None:
    """Bins of width 0.2, sigma 0.15."""
    actual = hl_gauss_targets(f64(0.5, 1), **FIVE, support="midpoint")
    expected = [[0.0223, 0.2299, 0.4954, 0.2299, 0.0223], [0, 0.0001, 0.0076, 0.1748, 0.8176]]
    equal(actual, torch.tensor(expected, dtype=torch.float64), atol=5e-5)


def test_hl_gauss_of_two_inclusive_bins_is_a_normal_distribution_function() -> None:
    """The edge at 0.5, sigma 0.75: Phi(0.5 / 0.75) for a target at the end."""
    options: dict[str, Any] = {"low": 0, "high": 1, "num_bins": 2, "support": "inclusive"}
    actual = hl_gauss_targets(f64(1.0), **options, sigma_ratio=0.75)
    share = 0.5 * (1 + math.erf((0.5 / 0.75) / math.sqrt(2)))
    equal(actual, f64(1 - share, share)[None])


def test_a_reward_at_the_end_needs_a_padded_support() -> None:
    assert decoded(0.5, low=0, high=1, num_bins=5, support="midpoint") == pytest.approx(0.5)
    at_one = [
        decoded(1.0, low=0, high=1, num_bins=5, support="midpoint"),
        decoded(1.0, low=0, high=1, num_bins=5, support="inclusive"),
        decoded(1.0, low=0, high=1, num_bins=51, support="midpoint"),
        decoded(1.0, low=-0.1, high=1.1, num_bins=101, support="midpoint"),
    ]
    assert [round(at_one[0], 3), round(at_one[1], 3)] == [0.862, 0.931]
    assert [round(at_one[2], 4), round(at_one[3], 4)] == [0.9865, 1.0]


def test_easyppos_width_follows_from_its_support() -> None:
    """101 bins: sigma 0.009 on [-0.1, 1.1], 0.0165 on [-1.1, 1.1] (rounded in the paper)."""
    for low, high, sigma in ((-0.1, 1.1, 0.009), (-1.1, 1.1, 0.0165)):
        centers = categorical_centers(low=low, high=high, num_bins=101, support="midpoint")
        assert 0.75 * float(centers[1] - centers[0]) == pytest.approx(sigma, rel=0.02)


def test_hl_gauss_targets_outside_the_support() -> None:
    outside, ends = f64(-3, 1.2, 900), f64(0, 1, 1)
    clamped = hl_gauss_targets(outside, **FIVE, support="midpoint")
    equal(clamped, hl_gauss_targets(ends, **FIVE, support="midpoint"))
    kept = hl_gauss_targets(outside, **FIVE, support="inclusive")
    equal(kept[0], f64(1, 0, 0, 0, 0))
    equal(kept[2], f64(0, 0, 0, 0, 1))
    # the last edge at 0.875, sigma 0.1875: Phi((1.2 - 0.875) / 0.1875)
    share = 0.5 * (1 + math.erf((0.325 / 0.1875) / math.sqrt(2)))
    assert kept[1, 4].item() == pytest.approx(share, abs=1e-12)


@bounded
@given(
    st.lists(st.floats(-3, 4), min_size=1, max_size=6),
    st.integers(2, 60),
    supports,
    st.floats(0.01, 5),
)
def test_hl_gauss_is_a_distribution_that_rises_with_its_target(
    y: list[float], num_bins: int, support: Any, sigma_ratio: float
) -> None:
    options: dict[str, Any] = {"low": -0.5, "high": 1.5, "num_bins": num_bins, "support": support}
    targets = hl_gauss_targets(f64(*sorted(y)), **options, sigma_ratio=sigma_ratio)
    assert bool((targets >= 0).all())
    equal(targets.sum(dim=-1), torch.ones(len(y), dtype=torch.float64))
    means = (targets * categorical_centers(**options).double()).sum(dim=-1)
    assert bool((means.diff() >= -1e-9).all())
    mirrored = hl_gauss_targets(1 - f64(*sorted(y)), **options, sigma_ratio=sigma_ratio)
    equal(mirrored.flip(-1), targets, atol=1e-9)


def test_two_hot_targets() -> None:
    actual = two_hot_targets(f64(0.3, -2, 1, 5), torch.tensor([0.0, 1.0]))
    equal(actual, torch.tensor([[0.7, 0.3], [1, 0], [0, 1], [0, 1]], dtype=torch.float64))
    middle = two_hot_targets(f64(0.5, 0.625), f64(0, 0.5, 1))
    equal(middle, torch.tensor([[0, 1, 0], [0, 0.75, 0.25]], dtype=torch.float64))


@bounded
@given(
    st.lists(st.floats(-3, 4), min_size=1, max_size=6), st.integers(2, 60), supports, st.booleans()
)
def test_two_hot_decodes_to_its_target_within_the_support(
    y: list[float], num_bins: int, support: Any, is_float32: bool
) -> None:
    centers = categorical_centers(low=-1, high=2, num_bins=num_bins, support=support)
    x = torch.tensor(y, dtype=torch.float32 if is_float32 else torch.float64).view(1, -1)
    targets = two_hot_targets(x, centers)
    assert bool((targets >= 0).all())
    assert bool(((targets > 0).sum(dim=-1) <= 2).all())
    expected = x.double().clamp(float(centers[0]), float(centers[-1])).to(x.dtype)
    mean = (targets * centers.to(x.dtype)).sum(dim=-1)
    equal(mean, expected, atol=1e-6 if is_float32 else 1e-12)


def test_categorical_value_is_the_mean_of_the_bins() -> None:
    logits = f64(0.1, 0.2, 0.7).log() + 5
    assert categorical_value(logits, f64(-1, 0, 1)).item() == pytest.approx(0.6, abs=1e-12)
    zero = categorical_value(torch.zeros(2, 3, 4), torch.tensor([0.0, 1.0, 2.0, 9.0]))
    assert torch.equal(zero, torch.full((2, 3), 3.0))


def test_categorical_value_in_bfloat16_keeps_the_precision_of_float32() -> None:
    centers = categorical_centers(low=0, high=1, num_bins=101, support="midpoint")
    logits = torch.randn(7, 101, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = categorical_value(logits, centers)
    assert values.dtype == torch.float32
    exact = (logits.double().softmax(-1) * centers.double()).sum(-1)
    equal(values.double(), exact, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        equal(categorical_value(logits, centers), values, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_of_low_precision_are_float32(dtype: torch.dtype) -> None:
    y = torch.tensor([0.25, 1.0], dtype=dtype)
    for targets in (
        hl_gauss_targets(y, **FIVE, support="midpoint"),
        two_hot_targets(y, torch.tensor([0.0, 1.0])),
    ):
        assert targets.dtype == torch.float32
    exact = hl_gauss_targets(y.double(), **FIVE, support="midpoint").float()
    assert torch.equal(hl_gauss_targets(y, **FIVE, support="midpoint"), exact)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_target_that_is_not_finite_shows_in_its_own_row_only(bad: float) -> None:
    for support in ("midpoint", "inclusive"):
        targets = hl_gauss_targets(f64(bad, 0.5), **FIVE, support=support)
        assert targets[0].isnan().all()
        assert targets[1].isfinite().all()
    targets = two_hot_targets(f64(bad, 0.5), f64(0, 0.5, 1))
    assert targets[0].isnan().any()
    equal(targets[1], f64(0, 1, 0))


def test_targets_have_no_gradient() -> None:
    y = f64(0.3).requires_grad_()
    assert not hl_gauss_targets(y, **FIVE, support="midpoint").requires_grad
    assert not two_hot_targets(y, f64(0, 1)).requires_grad


def test_first_biases() -> None:
    """Two bins: logit p; bounded: tan(pi (p - 1/2)); both on [0, 1]."""
    assert bounded_bias(0.52, low=0, high=1) == pytest.approx(math.tan(math.pi * 0.02))
    assert bounded_bias(0.0, low=-1, high=3) == pytest.approx(-1.0)
    two = categorical_bias(0.52, f64(0, 1))
    half = math.log(0.52 / 0.48) / 2
    equal(two, f64(-half, half), atol=1e-9)
    equal(categorical_bias(0.5, f64(0, 0.5, 1)), f64(0, 0, 0))
    assert categorical_bias(0.5, torch.tensor([0.0, 1.0])).dtype == torch.float32


@bounded
@given(st.floats(0.001, 0.999), st.integers(2, 101), supports, st.floats(-3, 3))
def test_a_head_starts_at_the_mean_reward(
    share: float, num_bins: int, support: Any, low: float
) -> None:
    centers = categorical_centers(low=low, high=low + 2, num_bins=num_bins, support=support)
    first, last = float(centers[0]), float(centers[-1])
    p = first + share * (last - first)
    value = categorical_value(categorical_bias(p, centers.double()), centers)
    assert value.item() == pytest.approx(p, abs=1e-9)
    bias = f64(bounded_bias(p, low=low, high=low + 2))
    assert bounded_value(bias, low=low, high=low + 2).item() == pytest.approx(p, abs=1e-9)


@pytest.mark.parametrize("bad", [{"low": 1}, {"low": NAN}, {"high": INF}, {"low": -INF}])
def test_a_bad_range_is_refused(bad: dict[str, float]) -> None:
    ends: Any = {"low": 0, "high": 1} | bad
    with pytest.raises(ValueError, match="low below high"):
        bounded_value(f64(0), **ends)
    with pytest.raises(ValueError, match="low below high"):
        bounded_bias(0.5, **ends)
    with pytest.raises(ValueError, match="low below high"):
        categorical_centers(**ends, num_bins=3, support="midpoint")
    with pytest.raises(ValueError, match="low below high"):
        hl_gauss_targets(f64(0), **ends, num_bins=3, support="midpoint", sigma_ratio=0.75)


@pytest.mark.parametrize(
    ("bad", "word"),
    [({"num_bins": 1}, "num_bins"), *(({"sigma_ratio": x}, "sigma_ratio") for x in (0, NAN, INF))],
)
def test_bad_bins_are_refused(bad: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        hl_gauss_targets(f64(0), **{**FIVE, "support": "midpoint", **bad})


def test_bad_centers_and_supports_are_refused() -> None:
    with pytest.raises(ValueError, match="ascending"):
        two_hot_targets(f64(0), f64(0, 1, 1))
    with pytest.raises(ValueError, match="ascending"):
        categorical_bias(0.5, f64(0))
    for p in (0.0, 1.0, -1.0, NAN):
        with pytest.raises(ValueError, match="mean_reward"):
            categorical_bias(p, f64(0, 1))
        with pytest.raises(ValueError, match="mean_reward"):
            bounded_bias(p, low=0, high=1)
