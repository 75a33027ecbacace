"""GAE and the group baselines against slow code of another shape: plain Python numbers."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vapo.functional.advantages import (
    decoupled_gae,
    gae,
    length_adaptive_lambda,
    monte_carlo_returns,
)
from vapo.functional.baselines import group_relative_advantages, leave_one_out_advantages


def recurrence(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambdas: list[float]
) -> Tensor:
    """Row by row and from the right over the sampled tokens only, in Python floats."""
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for row, lambda_ in enumerate(lambdas):
        next_value, next_advantage = 0.0, 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                value = float(values[row, t])
                delta = float(rewards[row, t]) + gamma * next_value - value
                next_advantage = delta + gamma * lambda_ * next_advantage
                next_value = value
                result[row, t] = next_advantage
    return result


def random_batch(seed: int, shape: tuple[int, int], kept: float) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(shape, dtype=torch.float64, generator=g) for _ in range(2))
    mask = torch.rand(shape, generator=g) < kept
    if kept == 1.0:
        lengths = torch.randint(0, shape[1] + 1, (shape[0], 1), generator=g)
        mask = torch.arange(shape[1]) < lengths
    return rewards, values, mask


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 4),
    num_columns=st.integers(1, 150),
    kept=st.sampled_from([0.1, 0.6, 0.95, 1.0]),
    gamma=st.floats(0, 1),
    lambda_=st.floats(0, 1),
)
def test_gae_is_the_recurrence(seed, num_rows, num_columns, kept, gamma, lambda_) -> None:
    rewards, values, mask = random_batch(seed, (num_rows, num_columns), kept)
    actual = gae(rewards, values, mask, gamma=gamma, lambda_=lambda_)
    expected = recurrence(rewards, values, mask, gamma, [lambda_] * num_rows)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("num_columns", [1, 31, 32, 33, 1023, 1024, 1025, 1057])
@pytest.mark.parametrize("kept", [0.9, 1.0])
def test_sizes_around_the_chunks(num_columns: int, kept: float) -> None:
    rewards, values, mask = random_batch(num_columns, (3, num_columns), kept)
    lambdas = torch.tensor([[1.0], [0.999], [0.3]], dtype=torch.float64)
    advantages, targets = decoupled_gae(
        rewards, values, mask, gamma=1.0, lambda_policy=lambdas, lambda_critic=0.9
    )
    expected = recurrence(rewards, values, mask, 1.0, [1.0, 0.999, 0.3])
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-11)
    critic = recurrence(rewards, values, mask, 1.0, [0.9] * 3) + torch.where(mask, values, 0.0)
    torch.testing.assert_close(targets, critic, rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.9, 1.0])
def test_float32_is_exact_to_1e_5_on_long_responses(kept: float) -> None:
    rewards, values, mask = random_batch(7, (4, 8192), kept)
    rewards, values = rewards.float(), values.float()
    lambda_ = length_adaptive_lambda(mask.sum(dim=1), alpha=0.05)
    advantages, targets = decoupled_gae(
        rewards, values, mask, gamma=1.0, lambda_policy=lambda_, lambda_critic=1.0
    )
    assert advantages.dtype == targets.dtype == torch.float32
    expected = recurrence(rewards, values, mask, 1.0, lambda_.flatten().tolist())
    torch.testing.assert_close(advantages.double(), expected, rtol=0, atol=1e-5)
    returns = recurrence(rewards, torch.zeros_like(values), mask, 1.0, [1.0] * 4)
    torch.testing.assert_close(targets.double(), returns, rtol=0, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_monte_carlo_returns_are_gae_without_values(gamma: float) -> None:
    rewards, values, mask = random_batch(3, (4, 90), 0.7)
    actual = monte_carlo_returns(rewards, mask, gamma=gamma)
    expected = recurrence(rewards, torch.zeros_like(values), mask, gamma, [1.0] * 4)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    _, targets = decoupled_gae(
        rewards, values, mask, gamma=gamma, lambda_policy=0.9, lambda_critic=1.0
    )
    assert torch.equal(targets, actual)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0]), min_size=4, max_size=40),
    group_size=st.integers(2, 4),
)
def test_group_baselines_are_those_of_the_statistics_module(rewards, group_size) -> None:
    rewards = rewards[: len(rewards) // group_size * group_size]
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    relative = [
        (r - statistics.mean(g)) / (statistics.stdev(g) + 1e-6) if len(set(g)) > 1 else 0.0
        for g in groups
        for r in g
    ]
    leave_one_out = [
        g[i] - statistics.mean(g[:i] + g[i + 1 :]) for g in groups for i in range(group_size)
    ]
    x = torch.tensor(rewards, dtype=torch.float64)
    actual = group_relative_advantages(x, group_size=group_size)
    assert actual.tolist() == pytest.approx(relative, abs=1e-12)
    actual = leave_one_out_advantages(x, group_size=group_size)
    assert actual.tolist() == pytest.approx(leave_one_out, abs=1e-12)
