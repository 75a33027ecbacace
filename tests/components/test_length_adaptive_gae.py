"""Component length_adaptive_gae: lambda_policy = 1 - 1/(alpha * l)."""

import math

import pytest
import torch

from vapo.functional.advantages import gae, length_adaptive_lambda


def reward_reach(length: int, lambda_) -> float:
    """How much of a final reward of 1 arrives in the first token's advantage."""
    rewards = torch.zeros(1, length, dtype=torch.float64)
    rewards[0, -1] = 1.0
    mask = torch.ones(1, length, dtype=torch.bool)
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=1.0, lambda_=lambda_)[0, 0].item()


def test_on_gives_the_papers_lambdas() -> None:
    lengths = torch.tensor([32, 64, 256, 400, 1024, 8192])
    actual = length_adaptive_lambda(lengths, alpha=0.05)
    expected = [[0.375], [0.6875], [0.921875], [0.95], [0.98046875], [0.99755859375]]
    torch.testing.assert_close(
        actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_short_responses_are_clamped_to_zero() -> None:
    # 1 - 1/(0.05 * l) is negative below l = 20, and minus infinity for an empty response
    lengths = torch.tensor([0, 1, 19, 20, 21])
    actual = length_adaptive_lambda(lengths, alpha=0.05).flatten()
    assert actual[:4].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert actual[4].item() == pytest.approx(1 - 1 / 1.05, abs=1e-7)


@pytest.mark.parametrize("alpha", [0, -0.05, float("nan")])
def test_alpha_must_be_above_zero(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(torch.tensor([10]), alpha=alpha)


@pytest.mark.parametrize("length", [100, 400, 3000])
def test_gae_weights_add_up_to_the_horizon(length: int) -> None:
    # sum_t lambda^t = 1 / (1 - lambda) = alpha * l, over an endless response
    alpha = 0.05
    lambda_ = length_adaptive_lambda(torch.tensor([length], dtype=torch.float64), alpha=alpha)
    ones = torch.ones(1, 50 * length, dtype=torch.float64)
    total = gae(ones, torch.zeros_like(ones), ones.bool(), gamma=1.0, lambda_=lambda_)[0, 0].item()
    assert total == pytest.approx(alpha * length, rel=1e-9)


def test_off_is_plain_ppo_bitwise() -> None:
    # Off is the constant; where the adaptive lambda happens to be that constant, nothing differs.
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(3, 400, dtype=torch.float64, generator=generator)
    values = torch.randn(3, 400, dtype=torch.float64, generator=generator)
    mask = torch.ones(3, 400, dtype=torch.bool)
    adaptive = length_adaptive_lambda(mask.sum(dim=1).double(), alpha=0.05)
    assert adaptive.flatten().tolist() == [0.95] * 3
    on = gae(rewards, values, mask, gamma=1.0, lambda_=adaptive)
    off = gae(rewards, values, mask, gamma=1.0, lambda_=0.95)
    assert torch.equal(on, off)


def test_each_response_gets_the_lambda_of_its_own_length() -> None:
    lengths = torch.tensor([400, 40], dtype=torch.float64)
    mask = torch.arange(400) < lengths[:, None]
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(2, 400, dtype=torch.float64, generator=generator)
    values = torch.randn(2, 400, dtype=torch.float64, generator=generator)
    lambda_ = length_adaptive_lambda(lengths, alpha=0.05)
    together = gae(rewards, values, mask, gamma=1.0, lambda_=lambda_)
    for row, constant in enumerate((0.95, 0.5)):
        alone = gae(
            rewards[row : row + 1],
            values[row : row + 1],
            mask[row : row + 1],
            gamma=1.0,
            lambda_=constant,
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)


def test_negative_control_a_fixed_lambda_loses_the_reward_of_a_long_response() -> None:
    # With 0.95 the first of 400 tokens gets 1e-9 of the reward and the first of 8000 nothing.
    # Adaptive, alpha 0.5: the reach is about e^(-1/alpha) = 0.135 at any length.
    assert reward_reach(400, 0.95) == pytest.approx(0.95**399, rel=1e-9)
    assert reward_reach(400, 0.95) < 2e-9
    assert reward_reach(8000, 0.95) < 1e-170
    for length in (400, 8000):
        lambda_ = length_adaptive_lambda(torch.tensor([length]).double(), alpha=0.5)
        assert reward_reach(length, lambda_) == pytest.approx(math.exp(-2), abs=2e-3)


def test_negative_control_at_short_lengths_the_papers_alpha_is_the_worse_one() -> None:
    # Below 400 tokens alpha 0.05 shortens the horizon that 0.95 has: a small run needs its own.
    papers = length_adaptive_lambda(torch.tensor([32]), alpha=0.05)
    larger = length_adaptive_lambda(torch.tensor([32]), alpha=2.0)
    assert reward_reach(32, papers) < 1e-12 < reward_reach(32, 0.95) < reward_reach(32, larger)
