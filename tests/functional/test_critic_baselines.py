"""Baselines between a critic and a group, and noise weights, against the papers' numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import equal, f64, mask
from vapo.functional.advantages import gae
from vapo.functional.baselines import leave_one_out_advantages, prompt_noise_weights
from vapo.functional.critic_mixtures import (
    batch_mean_advantages,
    gate_explained_variance,
    lagged_rho,
    linear_mix,
    tether_advantages,
    tether_fit,
)
from vapo.functional.losses import value_loss
from vapo.functional.masking import lowest_share_mask

NAN, INF = float("nan"), float("inf")
bounded = settings(max_examples=30, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)


def successes(*counts: int, low: float = -1.0) -> Tensor:
    """Rewards of prompts with 16 responses each, so many of them right."""
    rows = [[1.0] * count + [low] * (16 - count) for count in counts]
    return torch.tensor(rows, dtype=torch.float64).flatten()


def test_tether_by_hand() -> None:
    """R = 1, B = 0.5, V = 0.7 and 1, lambda 1: F = 0.2, 0.5 and y = 0.5, 0.5."""
    values, is_token = f64([0.7, 1, NAN]), mask("xx.")
    advantages = gae(f64([0, 1, NAN]), values, is_token, gamma=1, lambda_=1)
    equal(advantages, f64([0.3, 0, 0]))
    rho = tether_fit(values, f64([0.5]), advantages, is_token, ridge=0)
    assert rho.item() == pytest.approx(0.35 / 0.29, abs=1e-12)
    assert round(rho.item(), 4) == 1.2069
    assert round(lagged_rho(0.0, rho.item(), decay=0.9), 4) == 0.1207
    assert lagged_rho(0.5, 1.0, decay=0.9) == pytest.approx(0.55)
    applied = tether_advantages(values, f64([0.5]), advantages, is_token, rho=0.5)
    equal(applied, f64([0.4, 0.25, 0]))


def test_tether_with_a_ridge() -> None:
    """Sums over 2 tokens: F^2 0.29, y^2 0.5; the ridge is relative to the larger."""
    values, advantages = f64([0.7, 1]), f64([0.3, 0])
    rho = tether_fit(values, f64([0.5])[0, 0], advantages, mask("xx"), ridge=0.1)
    assert rho.item() == pytest.approx(0.175 / (0.145 + 0.1 * 0.25), abs=1e-12)
    larger = tether_fit(10 * values, f64([5, 5]), 0 * advantages, mask("xx"), ridge=0.1)
    assert larger.item() == pytest.approx(1 / 1.1, abs=1e-12)  # y = F: both powers are equal


def test_tether_without_a_fit_is_skipped() -> None:
    values, advantages = f64([0.5, 0.5]), f64([0.3, 0])
    assert tether_fit(values, f64([0.5]), advantages, mask("xx"), ridge=0.1).isnan()
    assert tether_fit(values + 1, f64([0.5]), advantages, mask(".."), ridge=0.1).isnan()
    assert lagged_rho(0.25, NAN, decay=0.9) == 0.25
    with pytest.raises(ValueError, match="ridge"):
        tether_fit(values, f64([0.5]), advantages, mask("xx"), ridge=-1e-6)
    with pytest.raises(ValueError, match="decay"):
        lagged_rho(0.0, 1.0, decay=1.5)


@bounded
@given(seeds, st.floats(-1, 2), st.sampled_from([NAN, INF, 999.0]))
def test_tether_finds_the_rho_that_the_advantages_have(
    seed: int, rho: float, garbage: float
) -> None:
    """With y = rho F the fit is rho, whatever lies in the padding, and over two ranks."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(4, 5, generator=draw, dtype=torch.float64)
    baselines = torch.randn(4, 1, generator=draw, dtype=torch.float64)
    is_token = torch.rand(4, 5, generator=draw) < 0.7
    is_token[:, 0] = True
    advantages = torch.where(is_token, (rho - 1) * (values - baselines), garbage)
    values = torch.where(is_token, values, garbage)
    options: dict[str, Any] = {"ridge": 0.0}
    fit = tether_fit(values, baselines, advantages, is_token, **options)
    assert fit.item() == pytest.approx(rho, abs=1e-9)
    tethered = tether_advantages(values, baselines, advantages, is_token, rho=rho)
    equal(tethered, torch.zeros_like(tethered), atol=1e-9)
    noisy = advantages + torch.randn(4, 5, generator=draw, dtype=torch.float64)
    whole = tether_fit(values, baselines, noisy, is_token, ridge=0.1)
    seen: list[Tensor] = []

    def with_seen(sums: Tensor) -> Tensor:
        seen.append(sums)
        return torch.stack(seen).sum(dim=0)

    for rows in (slice(2, 4), slice(0, 2)):  # the second call has the first rank's sums too
        cut = (values[rows], baselines[rows], noisy[rows], is_token[rows])
        fit = tether_fit(*cut, ridge=0.1, reduce=with_seen)
    equal(fit, whole)


def test_tether_at_its_ends_and_the_linear_mix() -> None:
    """At lambda 1 both are R - (1 - rho) B - rho V."""
    rewards, is_token = f64([0, 1, 9], [0, 0, 0]), mask("xx.", "xxx")
    values = f64([0.7, 0.4, NAN], [0.1, 0.2, 0.3])
    advantages = gae(rewards, values, is_token, gamma=1, lambda_=1)
    group = leave_one_out_advantages(f64([1, 0])[0], group_size=2)[:, None]  # B = 0 and 1
    baselines = f64([0], [1])
    for rho in (0.0, 0.25, 1.0):
        mixed = linear_mix(advantages, group, is_token, rho=rho)
        expected = rho * advantages + torch.where(is_token, (1 - rho) * group, 0.0)
        equal(mixed, expected)
        equal(tether_advantages(values, baselines, advantages, is_token, rho=rho), mixed)
    by_hand = f64([0.65, 0.8, 0], [-0.55, -0.6, -0.65])  # rho 0.5
    equal(linear_mix(advantages, group, is_token, rho=0.5), by_hand)


def test_mixtures_ignore_padding_and_are_float32_for_bfloat16() -> None:
    is_token = mask("x.")
    actual = linear_mix(f64([1, NAN]), f64([3, INF]), is_token, rho=0.25)
    equal(actual, f64([2.5, 0]))
    actual = tether_advantages(f64([1, NAN]), f64([3, INF]), f64([1, 999]), is_token, rho=0.25)
    equal(actual, f64([1 - 0.75 * 2, 0]))
    x = torch.tensor([[0.7, 1.0]]).bfloat16()
    assert linear_mix(x, x, is_token, rho=0.5).dtype == torch.float32
    assert tether_advantages(x, x, x, is_token, rho=0.5).dtype == torch.float32
    assert tether_fit(x, 0 * x, x, is_token, ridge=0).dtype == torch.float32
    assert batch_mean_advantages(x[0]).dtype == torch.float32


def test_evpo_by_hand() -> None:
    gate = gate_explained_variance(f64([0.9, 0.1])[0], f64([1, 0])[0])
    assert gate.item() == pytest.approx(0.96, abs=1e-12)
    harmful = gate_explained_variance(f64([0.1, 0.9])[0], f64([1, 0])[0])
    assert harmful.item() == pytest.approx(1 - 0.81 / 0.25, abs=1e-12)
    equal(batch_mean_advantages(f64([1, 0, 0.5])[0]), f64([0.5, -0.5, 0])[0])
    counted = torch.tensor([True, True, False])
    equal(batch_mean_advantages(f64([1, 0, 9])[0], counted=counted), f64([0.5, -0.5, 8.5])[0])


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [0.0], []])
def test_equal_rewards_open_the_gate_for_the_mean(rewards: list[float]) -> None:
    r = torch.tensor(rewards, dtype=torch.float64)
    gate = gate_explained_variance(torch.linspace(0, 1, len(r), dtype=torch.float64), r)
    assert gate.item() == 0.0


def test_a_broken_critic_does_not_hide_behind_the_gate() -> None:
    gate = gate_explained_variance(f64([NAN, 0.5])[0], f64([1, 0])[0])
    assert gate.isnan()


def test_the_gate_and_the_mean_are_of_all_ranks() -> None:
    values, rewards = f64([0.9, 0.1, 0.4, 0.8])[0], f64([1, 0, 0, 1])[0]
    whole = gate_explained_variance(values, rewards)
    # second rank: errors -0.4, 0.2; batch means 0.5 and -0.05; deviations -0.35, 0.25
    others = iter([f64([2, 1, -0.2])[0], f64([0.5, 0.35**2 + 0.25**2])[0]])
    first = gate_explained_variance(
        values[:2], rewards[:2], reduce=lambda sums: sums + next(others)
    )
    equal(first, whole)
    mean = batch_mean_advantages(rewards[:2], reduce=lambda sums: sums + f64([3, 2])[0])
    equal(mean, f64([0, -1])[0])  # (1 + 3) / 4


def test_noise_weights_of_easyppo() -> None:
    """+-1, 16 responses: one right, none, half; sigma 0.4841, 0, 1; u 2.0656, 4, 1."""
    weights = prompt_noise_weights(successes(1, 0, 8), group_size=16, reward_range=(-1, 1))
    by_prompt = weights.view(3, 16)
    assert torch.equal(by_prompt, by_prompt[:, :1].expand(3, 16))
    equal(by_prompt[:, 0], f64([0.8770, 1.6983, 0.4246])[0], atol=1e-4)
    sigma = math.sqrt(15) / 8  # 2 sqrt(1/16 * 15/16)
    u = [1 / sigma, 4, 1]
    equal(by_prompt[:, 0], f64([3 * x / sum(u) for x in u])[0])


@pytest.mark.parametrize(("low", "floor"), [(-1.0, 0.25), (0.0, 0.125)])
def test_the_noise_of_a_prompt_has_a_floor(low: float, floor: float) -> None:
    """None right and half right: u is 1 / floor and 1 / (range / 2)."""
    rewards = successes(0, 8, low=low)
    weights = prompt_noise_weights(rewards, group_size=16, reward_range=(low, 1))
    ratio = (weights[0] / weights[16]).item()
    assert ratio == pytest.approx((1 - low) / 2 / floor, abs=1e-12)


def test_the_weighted_value_loss_of_easyppo() -> None:
    """1 / (2 sum T) * sum_i w(s_i) sum_t (V - R)^2, tokens counted without weights."""
    rewards = f64([1, 0, 1, 1])[0]
    weights = prompt_noise_weights(rewards, group_size=2, reward_range=(0, 1))
    is_token = mask("xx", "x.", "xx", "x.")
    values = torch.full((4, 2), 0.25, dtype=torch.float64)
    actual = value_loss(
        values, rewards[:, None].expand(4, 2), is_token, token_weights=weights[:, None]
    )
    errors = [2 * 0.75**2, 0.25**2, 2 * 0.75**2, 0.75**2]
    expected = sum(w * e for w, e in zip(weights.tolist(), errors, strict=True)) / (2 * 6)
    assert actual.item() == pytest.approx(expected, abs=1e-12)


@bounded
@given(seeds, st.integers(2, 6), st.integers(1, 5), st.booleans())
def test_noise_weights_are_one_on_average_over_prompts(
    seed: int, group_size: int, num_prompts: int, is_float32: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.rand(num_prompts * group_size, generator=draw)
    rewards = rewards.round() if seed % 2 else rewards
    rewards = rewards if is_float32 else rewards.double()
    options: dict[str, Any] = {"group_size": group_size, "reward_range": (0, 1)}
    weights = prompt_noise_weights(rewards, **options)
    assert weights.dtype == rewards.dtype
    equal(weights.double().mean(), torch.ones((), dtype=torch.float64), atol=1e-6)
    scaled: dict[str, Any] = {"group_size": group_size, "reward_range": (2, 5)}
    equal(prompt_noise_weights(3 * rewards.double() + 2, **scaled), weights.double(), atol=1e-5)
    half = prompt_noise_weights(rewards.bfloat16(), **options)
    assert half.dtype == torch.float32


def test_noise_weights_over_two_ranks() -> None:
    rewards = successes(1, 0, 8)
    options: dict[str, Any] = {"group_size": 16, "reward_range": (-1, 1)}
    whole = prompt_noise_weights(rewards, **options)
    first = prompt_noise_weights(rewards[:32], **options, reduce=lambda x: x + f64([1, 1])[0])
    equal(first, whole[:32])


def test_noise_weights_need_groups_and_a_range() -> None:
    for group_size, words in ((1, "group_size >= 2"), (3, "not groups of 3")):
        with pytest.raises(ValueError, match=words):
            prompt_noise_weights(torch.ones(4), group_size=group_size, reward_range=(0, 1))
    for reward_range in ((1, 0), (1, 1), (0, NAN), (0, INF)):
        with pytest.raises(ValueError, match="reward_range"):
            prompt_noise_weights(torch.ones(4), group_size=2, reward_range=reward_range)


def test_the_tokens_on_which_critics_agree() -> None:
    spread, is_token = f64([0.1, 0.5, 0.2], [0.4, NAN, 0.3]), mask("xxx", "x.x")
    for share, found in ((0, "... ..."), (0.2, "x.. ..."), (0.59, "x.x ..."), (0.6, "x.x ..x")):
        assert torch.equal(lowest_share_mask(spread, is_token, share=share), mask(*found.split()))
    highest = lowest_share_mask(-spread, is_token, share=0.2)
    assert torch.equal(highest, mask(".x.", "..."))


def test_critics_that_agree_everywhere_mask_nothing() -> None:
    for is_token in (mask("xxx"), mask("...")):
        found = lowest_share_mask(f64([0, 0, 0]), is_token, share=0.5)
        assert not found.any()
    tied = lowest_share_mask(f64([0.3, 0.1, 0.3, 0.9]), mask("xxxx"), share=0.5)
    assert torch.equal(tied, mask(".x.."))
    for share in (-0.1, 1.0, NAN):
        with pytest.raises(ValueError, match="share"):
            lowest_share_mask(f64([0]), mask("x"), share=share)
