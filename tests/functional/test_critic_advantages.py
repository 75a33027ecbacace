"""Advantages of the critics of 2026: lambda by length, gaps, a bootstrap, anchors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import equal, f64, mask
from vapo.functional.advantages import (
    anchor_mask,
    decoupled_gae,
    gae,
    length_adaptive_lambda,
    length_geometric_lambda,
)
from vapo.functional.masking import place_at_last_token
from vapo.functional.metrics import first_token_reward_weight

NAN, INF = float("nan"), float("inf")
ANCHORS = (0.3, 0.6, 0.9)
bounded = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def kept(rows: Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in rows]


def test_saos_gae_skips_observations() -> None:
    advantages, returns = decoupled_gae(
        f64([0, 0, 1]),
        f64([0.2, 999, 0.4]),
        mask("x.x"),
        gamma=1.0,
        lambda_policy=1.0,
        lambda_critic=1.0,
    )
    equal(advantages, f64([0.8, 0, 0.6]))
    equal(returns, f64([1, 0, 1]))
    is_sampled = mask("x.x.")
    rewards = place_at_last_token(f64([1])[0], is_sampled)
    equal(gae(rewards, f64([0, 9, 0, 9]), is_sampled, gamma=1, lambda_=0.5), f64([0.5, 0, 1, 0]))


def test_lambdas_of_sao_and_bpco() -> None:
    assert length_adaptive_lambda(f64([6])[0], alpha=1.5).item() == pytest.approx(8 / 9)
    lambda_ = length_adaptive_lambda(f64([3])[0], alpha=0.4)
    assert lambda_.item() == pytest.approx(1 / 6)
    advantages = gae(f64([0, 0, 1]), f64([0.2, 0.5, 0.8]), mask("xxx"), gamma=1, lambda_=lambda_)
    equal(advantages, f64([0.3 + 1 / 18, 1 / 3, 0.2]))
    assert [round(x, 4) for x in advantages[0].tolist()] == [0.3556, 0.3333, 0.2]


def test_justrls_lambda() -> None:
    """k 0.5, 4 tokens: the first gets k^(3/4) of the reward, not k."""
    lambda_ = length_geometric_lambda(torch.tensor([4]), k=0.5)
    assert lambda_.dtype == torch.float64
    assert round(lambda_.item(), 4) == 0.8409
    advantages = gae(f64([0, 0, 0, 1]), f64([0, 0, 0, 0]), mask("xxxx"), gamma=1, lambda_=lambda_)
    equal(advantages, f64([0.5946, 0.7071, 0.8409, 1]), atol=5e-5)
    weight = first_token_reward_weight(torch.tensor([4]), lambda_)
    equal(weight.double(), advantages[:, 0], atol=1e-6)


def test_geometric_lambda_of_long_and_empty_responses() -> None:
    """In bfloat16 100000 tokens would have lambda 1, and no response an own one."""
    lengths = torch.tensor([0, 1, 100_000])
    actual = length_geometric_lambda(lengths, k=0.4).flatten()
    assert actual[0] == 0.0
    assert actual[1].item() == pytest.approx(0.4)
    assert actual[2].item() == pytest.approx(1 + math.log(0.4) / 100_000, abs=1e-7)
    assert actual[2] < 1
    assert length_geometric_lambda(lengths.bfloat16(), k=0.4).dtype == torch.float64
    assert actual[2].item() ** 100_000 == pytest.approx(0.4, abs=1e-9)
    assert length_geometric_lambda(lengths, k=1).flatten().tolist() == [0.0, 1.0, 1.0]


def test_lambda_does_not_round_a_long_responses_weight_away() -> None:
    """In float32 lambda^(l - 1) is off by up to 0.4 % at 127,000 tokens."""
    lengths = torch.tensor([127_000])
    for lambda_, weight in (
        (length_adaptive_lambda(lengths, alpha=0.05), (1 - 1 / 6350) ** 126_999),
        (length_geometric_lambda(lengths, k=0.5), 0.5 ** (126_999 / 127_000)),
    ):
        assert float(lambda_) ** 126_999 == pytest.approx(weight, rel=1e-9)


@pytest.mark.parametrize("k", [0, -0.5, 1.1, NAN])
def test_k_must_be_a_share(k: float) -> None:
    with pytest.raises(ValueError, match="k must be"):
        length_geometric_lambda(torch.tensor([3]), k=k)


@pytest.mark.parametrize(("alpha", "share"), [(0.05, 2e-9), (0.4, 0.08), (1.5, 0.51)])
def test_one_alpha_three_regimes(alpha: float, share: float) -> None:
    """VAPO, BPCO and SAO: about exp(-1/alpha) of the reward reaches the first token at once."""
    lengths = torch.tensor([50_000])
    lambda_ = length_adaptive_lambda(lengths.double(), alpha=alpha)
    weight = first_token_reward_weight(lengths, lambda_).item()
    assert weight == pytest.approx(math.exp(-1 / alpha), rel=1e-2)
    assert weight == pytest.approx(share, rel=0.05)
    assert math.exp(-1 / 1.5) == pytest.approx(0.513, abs=5e-4)  # the k that SAO's alpha is


def test_first_token_weight_is_the_advantage_without_values() -> None:
    lengths = torch.tensor([0, 1, 2, 5, 20, 30])
    lambda_ = length_adaptive_lambda(lengths.double(), alpha=0.05)
    is_token = torch.arange(30) < lengths[:, None]
    rewards = place_at_last_token(torch.ones(6, dtype=torch.float64), is_token)
    advantages = gae(rewards, torch.zeros_like(rewards), is_token, gamma=1, lambda_=lambda_)
    actual = first_token_reward_weight(lengths, lambda_)
    equal(actual.double(), advantages[:, 0], atol=1e-7)
    assert actual[:5].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert first_token_reward_weight(lengths, 0.5).tolist()[:4] == [0.0, 1.0, 0.5, 0.0625]


def test_anchors_of_sp3o() -> None:
    """Eleven tokens, two cut out, two, one, none."""
    rows = mask("xxxxxxxxxxx", "x.xx.xx....", "xx.........", "x..........", "...........")
    actual = anchor_mask(rows, fractions=ANCHORS)
    assert kept(actual) == [[3, 6, 9], [2, 3, 5], [0], [0], []]


def test_an_anchor_is_never_the_last_of_several_tokens_and_halves_round_to_even() -> None:
    rows = mask("xxxx", "xxx.", "x.x.")
    assert kept(anchor_mask(rows, fractions=[1.0])) == [[2], [1], [0]]
    assert kept(anchor_mask(rows, fractions=[0.5, 0])) == [[0, 2], [0, 1], [0]]
    six = mask("xxxxxx")  # 2.5 -> 2 as Python's round
    assert kept(anchor_mask(six, fractions=[0.5])) == [[2]]


@bounded
@given(
    st.lists(st.lists(st.booleans(), min_size=40, max_size=40), min_size=1, max_size=4),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_anchors_are_the_rounded_offsets_of_each_row(
    rows: list[list[bool]], fractions: list[float]
) -> None:
    actual = anchor_mask(torch.tensor(rows), fractions=fractions)
    for row, found in zip(rows, kept(actual), strict=True):
        places = [place for place, is_token in enumerate(row) if is_token]
        n = len(places)
        offsets = {max(0, min(round(f * (n - 1)), n - 2)) for f in fractions} if n else set()
        assert found == sorted(places[offset] for offset in offsets)


def test_the_anchor_of_long_responses_is_one_more_fraction() -> None:
    row = torch.ones(1, 6144, dtype=torch.bool)
    assert kept(anchor_mask(row, fractions=(*ANCHORS, 0.95))) == [[1843, 3686, 5529, 5836]]


@pytest.mark.parametrize("fractions", [[], [0.5, 1.5], [-0.1], [NAN]])
def test_anchors_need_fractions(fractions: list[float]) -> None:
    with pytest.raises(ValueError, match="fractions must be"):
        anchor_mask(mask("xx"), fractions=fractions)
