"""Engine against trainer: statistics, weights and masks against numbers worked out by hand."""

import math

import pytest
import torch

from tests.builders import f64, mask
from vapo.functional.mismatch import (
    icepop_weights,
    mismatch,
    responses_in_range,
    truncated_importance_weights,
)

NAN, INF = float("nan"), float("inf")
LN2 = math.log(2)


# d = ln 2, -ln 2, ln 4 | -ln 4; ratios 2, 1/2, 4 | 1/4; geometric means 4^(1/3) | 1/4
ROLLOUT = f64([-1.0, -1.0, -2.0], [-1.0, NAN, 0.0])
TRAINER = f64([-1 + LN2, -1 - LN2, -2 + 2 * LN2], [-1 - 2 * LN2, 0.0, INF])
MASK = mask("xxx", "x..")


def test_mismatch_by_hand() -> None:
    found = mismatch(ROLLOUT, TRAINER, MASK)
    assert found.mean_abs.item() == pytest.approx(6 * LN2 / 4, abs=1e-12)
    assert found.max_abs.item() == pytest.approx(2 * LN2, abs=1e-12)
    # sum of ratio - 1 - d: (2 + 1/2 + 4 + 1/4) - 4 - (1 - 1 + 2 - 2) ln 2
    assert found.k3.item() == pytest.approx(2.75 / 4, abs=1e-12)
    assert found.token_ratio.mean.item() == pytest.approx(6.75 / 4, abs=1e-12)
    assert found.token_ratio.min.item() == pytest.approx(0.25, abs=1e-12)
    assert found.token_ratio.max.item() == pytest.approx(4.0, abs=1e-12)
    variance = (4 + 0.25 + 16 + 0.0625) / 4 - (6.75 / 4) ** 2
    assert found.token_ratio.std.item() == pytest.approx(math.sqrt(variance), abs=1e-12)
    of_rows = [4 ** (1 / 3), 0.25]
    assert found.sequence_ratio.mean.item() == pytest.approx(sum(of_rows) / 2, abs=1e-12)
    assert found.sequence_ratio.max.item() == pytest.approx(of_rows[0], abs=1e-12)
    assert found.sequence_ratio.min.item() == pytest.approx(of_rows[1], abs=1e-12)
    std = (of_rows[0] - of_rows[1]) / 2
    assert found.sequence_ratio.std.item() == pytest.approx(std, abs=1e-12)


def test_outliers_leave_one_half_to_two() -> None:
    ratios = f64([1.99, 2.01, 0.51, 0.49, NAN])
    found = mismatch(torch.zeros_like(ratios), ratios.log(), mask("xxxx."))
    assert found.outlier_share.item() == 0.5


def test_no_mismatch_is_exactly_none() -> None:
    found = mismatch(TRAINER, TRAINER, MASK)
    assert (found.mean_abs, found.max_abs, found.k3, found.outlier_share) == (0, 0, 0, 0)
    for ratio in (found.token_ratio, found.sequence_ratio):
        assert (ratio.mean, ratio.std, ratio.min, ratio.max) == (1, 0, 1, 1)


def test_over_two_ranks_it_is_that_of_all_tokens() -> None:
    """Rank 1 has row 1; its shares of every sum are added, its maxima compared."""
    shares = iter(
        [
            f64([2 * LN2, 0.25 - 1 + 2 * LN2, 1, 1])[0],
            f64([0.25, 1])[0],
            torch.tensor((0.25 - 6.75 / 4) ** 2, dtype=torch.float64),
            f64([0.25, 1])[0],
            torch.tensor((0.25 - (4 ** (1 / 3) + 0.25) / 2) ** 2, dtype=torch.float64),
        ]
    )
    maxima = iter([2 * LN2, -0.25, 0.25, -0.25, 0.25])
    one = mismatch(ROLLOUT, TRAINER, MASK)
    two = mismatch(
        ROLLOUT[:1],
        TRAINER[:1],
        MASK[:1],
        reduce=lambda sums: sums + next(shares),
        reduce_max=lambda x: x.clamp(min=next(maxima)),
    )
    for a, b in zip(one[:4], two[:4], strict=True):
        assert a.item() == pytest.approx(b.item(), abs=1e-12)
    for x, y in zip((*one[4], *one[5]), (*two[4], *two[5]), strict=True):
        assert x.item() == pytest.approx(y.item(), abs=1e-12)


def test_a_broken_logprob_of_a_token_shows() -> None:
    for bad in (NAN, INF, -INF):
        found = mismatch(f64([-1.0, bad]), f64([-1.0, -1.0]), mask("xx"))
        assert not found.mean_abs.isfinite()
        assert found.k3.isnan()
        assert found.outlier_share.item() == 0.5


def test_an_enormous_gap_stays_finite_in_ratio() -> None:
    found = mismatch(f64([-900.0]), f64([0.0]), mask("x"))
    assert found.max_abs.item() == 900.0
    assert found.token_ratio.max.item() == pytest.approx(math.exp(20))


def test_token_weights_by_hand() -> None:
    weights = truncated_importance_weights(ROLLOUT, TRAINER, MASK, cap=2.5)
    torch.testing.assert_close(weights, f64([2.0, 0.5, 2.5], [0.25, 1.0, 1.0]), rtol=0, atol=1e-12)


def test_sequence_weights_are_the_product_by_hand() -> None:
    weights = truncated_importance_weights(ROLLOUT, TRAINER, MASK, cap=100, level="sequence")
    torch.testing.assert_close(weights, f64([4.0, 4.0, 4.0], [0.25, 1.0, 1.0]), rtol=0, atol=1e-12)
    capped = truncated_importance_weights(ROLLOUT, TRAINER, MASK, cap=3, level="sequence")
    torch.testing.assert_close(capped, f64([3.0, 3.0, 3.0], [0.25, 1.0, 1.0]), rtol=0, atol=1e-12)


def test_weights_carry_no_gradient_and_show_a_broken_logprob() -> None:
    trainer = TRAINER.clone().requires_grad_()
    weights = truncated_importance_weights(ROLLOUT, trainer, MASK, cap=2)
    assert not weights.requires_grad
    weights = truncated_importance_weights(f64([-1.0, NAN]), f64([-1.0, -1.0]), mask("xx"), cap=2)
    assert weights[0, 0].item() == 1.0
    assert weights[0, 1].isnan()


def test_icepop_weights_by_hand() -> None:
    """Ratios 2, 1/2, 4 | 1/4 in a band of 0.5 to 3: the bound itself is in it."""
    weights = icepop_weights(ROLLOUT, TRAINER, MASK, low=0.5, high=3)
    torch.testing.assert_close(weights, f64([2.0, 0.5, 0.0], [0.0, 1.0, 1.0]), rtol=0, atol=1e-12)
    ring = icepop_weights(ROLLOUT, TRAINER, MASK, low=0.5, high=5)
    torch.testing.assert_close(ring, f64([2.0, 0.5, 4.0], [0.0, 1.0, 1.0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_icepop_keeps_its_bounds_and_drops_what_is_beyond(dtype: torch.dtype) -> None:
    ratios = f64([0.4999, 0.5, 1.0, 5.0, 5.001]).to(dtype)
    weights = icepop_weights(torch.zeros_like(ratios), ratios.log(), mask("xxxxx"), low=0.5, high=5)
    kept = torch.tensor([[0, 0.5, 1, 5, 0]], dtype=dtype)
    torch.testing.assert_close(weights, kept, rtol=0, atol=1e-5)


def test_icepop_has_no_gradient_and_shows_a_broken_logprob() -> None:
    weights = icepop_weights(ROLLOUT, TRAINER.clone().requires_grad_(), MASK, low=0.5, high=5)
    assert not weights.requires_grad
    for bad in (NAN, INF, -INF):
        broken = icepop_weights(f64([-1.0, bad]), f64([-1.0, -1.0]), mask("xx"), low=0.5, high=5)
        assert broken.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 5.0), (-1.0, 5.0), (1.1, 5.0), (0.5, 0.9), (NAN, 5.0), (0.5, NAN)]
)
def test_icepop_needs_a_band_around_one(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="must have 1 in it"):
        icepop_weights(ROLLOUT, TRAINER, MASK, low=low, high=high)


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (None, None, [True, True]),
        (None, 1.5, [False, True]),
        (None, 1.6, [True, True]),
        (0.26, None, [True, False]),
        (0.24, None, [True, True]),
        (0.26, 1.5, [False, False]),
    ],
)
def test_range_is_of_the_geometric_mean(
    low: float | None, high: float | None, kept: list[bool]
) -> None:
    # 4^(1/3) = 1.587: neither the product 4 nor the largest token ratio 4
    assert responses_in_range(ROLLOUT, TRAINER, MASK, low=low, high=high).tolist() == kept


def test_length_alone_takes_no_response_out_of_range() -> None:
    """Negative control: the product of the same small token ratios leaves any range."""
    d = torch.full((2, 100), math.log(1.02), dtype=torch.float64)
    m = torch.arange(100) < torch.tensor([[1], [100]])
    zeros = torch.zeros_like(d)
    assert responses_in_range(zeros, d, m, low=0.9, high=1.1).tolist() == [True, True]
    product = truncated_importance_weights(zeros, d, m, cap=1e9, level="sequence")[:, 0]
    assert (product > 1.1).tolist() == [False, True]


def test_rows_without_tokens_and_with_nan_stay() -> None:
    rollout, trainer = f64([-1.0, -1.0], [NAN, -1.0]), f64([-9.0, -9.0], [-1.0, -1.0])
    kept = responses_in_range(rollout, trainer, mask("..", "xx"), low=0.9, high=1.1)
    assert kept.tolist() == [True, True]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="cap must be above 0"):
        truncated_importance_weights(ROLLOUT, TRAINER, MASK, cap=0)
