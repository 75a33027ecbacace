"""What must not change an advantage, and what the degenerate values reduce it to."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import equal
from vapo.functional.advantages import decoupled_gae, gae, monte_carlo_returns, whiten
from vapo.functional.metrics import explained_variance

B, T = 6, 130


def make_batch(*, gaps: bool) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(T) < torch.tensor([130, 1, 64, 32, 33, 0])[:, None]
    if gaps:
        mask &= torch.rand(B, T, generator=g) > 0.3
    rewards = torch.randn(B, T, dtype=torch.float64, generator=g)
    return rewards, torch.randn(B, T, dtype=torch.float64, generator=g), mask


either_mask = pytest.mark.parametrize("gaps", [False, True])


@either_mask
@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
def test_one_lambda_is_the_same_lambda_in_every_row(gaps: bool, lambda_: float) -> None:
    batch = make_batch(gaps=gaps)
    column = torch.full((B, 1), lambda_, dtype=torch.float64)
    one = decoupled_gae(*batch, gamma=0.99, lambda_policy=lambda_, lambda_critic=lambda_)
    per_row = decoupled_gae(*batch, gamma=0.99, lambda_policy=column, lambda_critic=column)
    equal(per_row[0], one[0])
    equal(per_row[1], one[1])


@either_mask
def test_lambda_one_gamma_one_gives_monte_carlo_targets(gaps: bool) -> None:
    rewards, values, mask = make_batch(gaps=gaps)
    advantages, targets = decoupled_gae(
        rewards, values, mask, gamma=1.0, lambda_policy=1.0, lambda_critic=1.0
    )
    sampled = torch.where(mask, rewards, 0.0)
    reward_to_go = torch.where(mask, sampled.flip(1).cumsum(1).flip(1), 0.0)
    equal(targets, reward_to_go)
    equal(monte_carlo_returns(rewards, mask, gamma=1.0), reward_to_go)
    equal(advantages, torch.where(mask, reward_to_go - values, 0.0))


@either_mask
def test_lambda_zero_gives_td_errors(gaps: bool) -> None:
    rewards, values, mask = make_batch(gaps=gaps)
    actual = gae(rewards, values, mask, gamma=0.9, lambda_=0.0)
    for row in range(B):
        columns = mask[row].nonzero().flatten().tolist()
        for t, following in zip(columns, [*columns[1:], None], strict=False):
            next_value = 0.0 if following is None else values[row, following].item()
            delta = rewards[row, t].item() + 0.9 * next_value - values[row, t].item()
            assert actual[row, t].item() == pytest.approx(delta, abs=1e-12)


@either_mask
def test_a_perfect_critic_leaves_no_advantage_at_any_lambda(gaps: bool) -> None:
    rewards, _, mask = make_batch(gaps=gaps)
    returns = monte_carlo_returns(rewards, mask, gamma=0.97)
    for lambda_ in (0.0, 0.7, 1.0):
        advantages = gae(rewards, returns, mask, gamma=0.97, lambda_=lambda_)
        equal(advantages, torch.zeros_like(rewards))


@either_mask
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_content_and_amount_of_padding(gaps: bool, garbage: float) -> None:
    rewards, values, mask = make_batch(gaps=gaps)
    lambda_ = torch.linspace(0.1, 1.0, B, dtype=torch.float64)[:, None]
    numbers: dict[str, Any] = {"gamma": 1.0, "lambda_policy": lambda_, "lambda_critic": 1.0}
    plain = decoupled_gae(rewards, values, mask, **numbers)
    for left, right in ((0, 77), (3, 0), (40, 5)):
        wide = torch.nn.functional.pad(mask, (left, right))
        noisy = [
            torch.where(wide, torch.nn.functional.pad(x, (left, right)), garbage)
            for x in (rewards, values)
        ]
        padded = decoupled_gae(noisy[0], noisy[1], wide, **numbers)
        for before, after in zip(plain, padded, strict=True):
            equal(after[:, left : left + T], before)
            assert torch.equal(after[~wide], torch.zeros_like(after[~wide]))
        equal(whiten(padded[0], wide)[:, left : left + T], whiten(plain[0], mask))
        equal(
            explained_variance(noisy[1], padded[1], wide),
            explained_variance(values, plain[1], mask),
        )


@either_mask
def test_order_of_rows(gaps: bool) -> None:
    batch = make_batch(gaps=gaps)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    lambda_ = torch.linspace(0.1, 1.0, B, dtype=torch.float64)[:, None]
    plain = gae(*batch, gamma=1.0, lambda_=lambda_)
    shuffled = gae(*(x[order] for x in batch), gamma=1.0, lambda_=lambda_[order])
    equal(shuffled, plain[order])


def test_gaps_are_as_if_they_were_not_there() -> None:
    rewards, values, mask = make_batch(gaps=True)
    with_gaps = gae(rewards, values, mask, gamma=0.98, lambda_=0.9)
    for row in range(B):
        m = mask[row]
        closed = gae(
            rewards[row, m][None], values[row, m][None], m[m][None], gamma=0.98, lambda_=0.9
        )
        equal(with_gaps[row, m][None], closed)
