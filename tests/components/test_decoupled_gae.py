"""Component decoupled_gae: value targets with lambda_critic, advantages with lambda_policy."""

import pytest
import torch

from vapo.functional.advantages import decoupled_gae, gae, monte_carlo_returns

# One response of 101 tokens with reward 1 at the end. The critic is a reward model: it knows the
# answer at the end (0.9) and scores early tokens low (-0.8): the bias that VC-PPO 3.2 describes.
T = 101
MASK = torch.ones(1, T, dtype=torch.bool)
REWARDS = torch.zeros(1, T, dtype=torch.float64)
REWARDS[0, -1] = 1.0
REWARD_MODEL_VALUES = torch.linspace(-0.8, 0.9, T, dtype=torch.float64)[None]


def targets_of(values: torch.Tensor, lambda_critic: float) -> torch.Tensor:
    return decoupled_gae(
        REWARDS, values, MASK, gamma=1.0, lambda_policy=0.95, lambda_critic=lambda_critic
    )[1]


def test_on_gives_the_hand_computed_advantages_and_targets() -> None:
    rewards = torch.tensor([[0, 0, 1]], dtype=torch.float64)
    values = torch.tensor([[0.2, 0.4, 0.6]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, targets = decoupled_gae(
        rewards, values, mask, gamma=1.0, lambda_policy=0.5, lambda_critic=1.0
    )
    # deltas 0.2, 0.2, 0.4; A_2 = 0.4, A_1 = 0.2 + 0.2 = 0.4, A_0 = 0.2 + 0.2 = 0.4
    expected = torch.tensor([[0.4, 0.4, 0.4]], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    assert targets.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_off_is_plain_ppo_bitwise(dtype: torch.dtype, as_tensor: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(5, 70, dtype=dtype, generator=generator)
    values = torch.randn(5, 70, dtype=dtype, generator=generator)
    mask = torch.arange(70) < torch.tensor([70, 1, 33, 64, 50])[:, None]
    shared = torch.full((5, 1), 0.95, dtype=dtype) if as_tensor else 0.95
    advantages, targets = decoupled_gae(
        rewards, values, mask, gamma=0.99, lambda_policy=shared, lambda_critic=shared
    )
    plain = gae(rewards, values, mask, gamma=0.99, lambda_=shared)
    assert torch.equal(advantages, plain)
    assert torch.equal(targets, torch.where(mask, plain + values, 0.0))


def test_lambda_critic_leaves_the_advantages_alone() -> None:
    plain = gae(REWARDS, REWARD_MODEL_VALUES, MASK, gamma=1.0, lambda_=0.95)
    for lambda_critic in (0.5, 0.95, 1.0):
        advantages, _ = decoupled_gae(
            REWARDS,
            REWARD_MODEL_VALUES,
            MASK,
            gamma=1.0,
            lambda_policy=0.95,
            lambda_critic=lambda_critic,
        )
        assert torch.equal(advantages, plain)


@pytest.mark.parametrize("lambda_critic", [1, 1.0, torch.ones(1, 1)])
def test_on_targets_do_not_depend_on_the_critic_at_all(lambda_critic) -> None:
    expected = monte_carlo_returns(REWARDS, MASK, gamma=1.0)
    for values in (REWARD_MODEL_VALUES, -7e5 * REWARD_MODEL_VALUES, torch.zeros_like(REWARDS)):
        assert torch.equal(targets_of(values, lambda_critic), expected)


def test_negative_control_a_shared_lambda_teaches_the_critic_its_own_bias() -> None:
    # First token, reward 100 steps away: it enters the target with weight 0.95^100 = 0.6 %.
    biased = targets_of(REWARD_MODEL_VALUES, 0.95)
    assert targets_of(REWARD_MODEL_VALUES, 1.0)[0, 0].item() == 1.0
    assert biased[0, 0].item() < -0.4
    # The weight itself: raise the reward by 1 and see how much of it arrives.
    raised = REWARDS.clone()
    raised[0, -1] += 1.0
    arrived = [
        decoupled_gae(
            raised, REWARD_MODEL_VALUES, MASK, gamma=1.0, lambda_policy=0.95, lambda_critic=lam
        )[1][0, 0].item()
        - targets_of(REWARD_MODEL_VALUES, lam)[0, 0].item()
        for lam in (0.95, 1.0)
    ]
    assert arrived == pytest.approx([0.95**100, 1.0], abs=1e-12)
    # And the next critic inherits the bias: fitted to its own targets twice, the shared
    # lambda still scores the first token below zero where the return is 1.
    values = REWARD_MODEL_VALUES
    for _ in range(2):
        values = targets_of(values, 0.95)
    assert values[0, 0].item() < 0.0
