"""Critic-free advantages and their losses against numbers worked out by hand."""

import math

import pytest
import torch

from tests.builders import equal, f64, mask
from vapo.functional.advantages import monte_carlo_returns, whiten
from vapo.functional.baselines import (
    correct_only_advantages,
    greedy_baseline_advantages,
    group_mean_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    step_advantages,
    whitened_group_mean_advantages,
)
from vapo.functional.losses import aggregate
from vapo.functional.surrogates import logprob_surrogate

GROUP_ESTIMATORS = [
    group_relative_advantages,
    group_mean_advantages,
    whitened_group_mean_advantages,
    leave_one_out_advantages,
]


def test_group_relative_advantages() -> None:
    # group 0: 1, -1, -1: mean -1/3, unbiased variance (16/9 + 4/9 + 4/9)/2 = 4/3
    std = math.sqrt(4 / 3) + 1e-6
    actual = group_relative_advantages(f64([1, -1, -1, 2, 4, 6])[0], group_size=3)
    expected = [4 / 3 / std, -2 / 3 / std, -2 / 3 / std, -2 / 2.000001, 0, 2 / 2.000001]
    equal(actual, f64(expected)[0])


def test_group_mean_advantages() -> None:
    # mean of the first group -1/3; no std: the second group's spread stays as it is
    actual = group_mean_advantages(f64([1, -1, -1, 2, 4, 6])[0], group_size=3)
    equal(actual, f64([4 / 3, -2 / 3, -2 / 3, -2, 0, 2])[0])


def test_whitened_group_mean_advantages() -> None:
    # centered: 1, -1 | 0, 0 | 3, -3; mean square (2 + 18)/6 = 10/3, the equal group counted
    actual = whitened_group_mean_advantages(f64([1, -1, 5, 5, 4, -2])[0], group_size=2)
    scale = 1 / math.sqrt(10 / 3 + 1e-8)
    equal(actual, f64([scale, -scale, 0, 0, 3 * scale, -3 * scale])[0])


def test_whitened_over_two_ranks_is_whitened_over_both() -> None:
    rewards = f64([1, -1, 5, 5, 4, -2])[0]
    whole = whitened_group_mean_advantages(rewards, group_size=2)
    others = f64([18, 2])[0]  # the second rank's squares and count
    first = whitened_group_mean_advantages(rewards[:4], group_size=2, reduce=lambda x: x + others)
    equal(first, whole[:4])


def test_the_variance_is_of_the_counted_responses() -> None:
    """A group without loss changes nothing for the others."""
    counted = torch.tensor([True, True, False, False])
    found = whitened_group_mean_advantages(f64([1, -1, 9, 1])[0], group_size=2, counted=counted)
    equal(found[:2], whitened_group_mean_advantages(f64([1, -1])[0], group_size=2))
    nobody = torch.zeros(2, dtype=torch.bool)
    assert (
        whitened_group_mean_advantages(f64([1, -1])[0], group_size=2, counted=nobody)
        .isfinite()
        .all()
    )


def test_leave_one_out_advantages() -> None:
    actual = leave_one_out_advantages(f64([1, -1, -1, 2, 4, 6])[0], group_size=3)
    equal(actual, f64([2, -1, -1, -3, 0, 3])[0])


def test_step_advantages() -> None:
    """Steps of 2, 1 and 2 tokens; of the whole response; of each token."""
    starts = mask("x.xx.", "x....", "xxx..")
    values = f64([0.5, 9, -0.25, 0.75, 9], [0.25, 9, 9, 9, 9], [0.5, 0, 1, 9, 9])
    rewards = f64([0, 0, 0, 0, 1], [0, 0, 0, -1, 0], [0, 0, 0, 0, 0])
    tokens = mask("xxxxx", "xxxx.", "xxx..")
    expected = f64(
        [-0.75, -0.75, 1.0, 0.25, 0.25],  # -0.25 - 0.5; 0.75 + 0.25; 1 - 0.75
        [-1.25, -1.25, -1.25, -1.25, 0],  # -1 - 0.25
        [-0.5, 1, -1, 0, 0],  # 0 - 0.5; 1 - 0; 0 - 1
    )
    equal(step_advantages(rewards, values, starts, tokens), expected)


def test_a_reward_belongs_to_the_step_of_its_token() -> None:
    """On a step's last token, and on the first of the next one; the steps add up to R - V(s_0)."""
    starts, tokens = mask("x.x."), mask("xxxx")
    values = f64([0.5, 0, 2, 0])
    equal(step_advantages(f64([0, 4, 0, 1]), values, starts, tokens), f64([5.5, 5.5, -1, -1]))
    equal(step_advantages(f64([0, 0, 4, 1]), values, starts, tokens), f64([1.5, 1.5, 3, 3]))


def test_steps_in_rows_with_gaps_and_padding_that_holds_anything() -> None:
    starts, tokens = mask("xx..x", ".x.xx"), mask(".xx.x", ".x.x.")
    nan = math.nan
    values = f64([nan, 0.5, nan, nan, 0.25], [nan, 0.5, nan, 2, nan])
    rewards = f64([nan, 0, 0, nan, 1], [nan, 0, nan, 1, nan])
    expected = f64([0, -0.25, -0.25, 0, 0.75], [0, 1.5, 0, -1, 0])
    equal(step_advantages(rewards, values, starts, tokens), expected)


def test_a_first_token_starts_a_step() -> None:
    rewards = f64([0, 0, 1])
    with pytest.raises(ValueError, match="first token must start a step"):
        step_advantages(rewards, rewards, mask("x.x"), mask(".xx"))


def test_greedy_baseline_advantages() -> None:
    rewards, greedy = f64([1, -1, 0.5])[0], f64([1, 1, -1])[0]
    equal(greedy_baseline_advantages(rewards, greedy), f64([0, -2, 1.5])[0])


def test_correct_only_advantages() -> None:
    assert correct_only_advantages(torch.tensor([True, False, True])).tolist() == [1.0, 0.0, 1.0]


def test_reward_to_go_with_the_token_kl_inside_whitened() -> None:
    # token rewards -0.1, -0.2, 1 - 0.3 and 0.4, -1: to go 0.4, 0.5, 0.7 and -0.6, -1
    token_rewards, sampled = f64([-0.1, -0.2, 0.7], [0.4, -1, 9]), mask("xxx", "xx.")
    to_go = monte_carlo_returns(token_rewards, sampled, gamma=1.0)
    equal(to_go, f64([0.4, 0.5, 0.7], [-0.6, -1, 0]))
    # mean 0, variance (0.16 + 0.25 + 0.49 + 0.36 + 1)/5 = 0.452
    scale = 1 / math.sqrt(0.452 + 1e-8)
    expected = f64([0.4 * scale, 0.5 * scale, 0.7 * scale], [-0.6 * scale, -scale, 0])
    equal(whiten(to_go, sampled), expected)


@pytest.mark.parametrize("reward", [0.1, -1.0, 1 / 3, 1e6 / 7])
@pytest.mark.parametrize("group_size", [2, 3, 7, 16])
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator, reward: float, group_size: int) -> None:
    rewards = torch.full((2 * group_size,), reward)
    assert torch.equal(estimator(rewards, group_size=group_size), torch.zeros_like(rewards))
    beside_others = torch.cat([rewards, torch.arange(float(group_size))])
    actual = estimator(beside_others, group_size=group_size)
    assert torch.equal(actual[: len(rewards)], torch.zeros_like(rewards))
    assert actual.isfinite().all()
    assert actual.abs().max() > 0


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_group_baselines_need_whole_groups_of_two_or_more(estimator) -> None:
    with pytest.raises(ValueError, match="group_size >= 2"):
        estimator(torch.ones(4), group_size=1)
    with pytest.raises(ValueError, match="not groups of 3"):
        estimator(torch.ones(4), group_size=3)


def test_logprob_surrogate_and_its_gradient() -> None:
    logprobs = f64([-1, -2, float("nan")]).requires_grad_()
    losses = logprob_surrogate(logprobs, f64([2, -3, 1]))
    assert losses[0, :2].tolist() == [2.0, -6.0]
    assert losses[0, 2].isnan(), "a broken token shows unless it is masked out"
    aggregate(losses, mask("xx."), reduction="sequence_sum").backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, 3.0, 0.0]]


def test_reductions_of_a_sequence() -> None:
    losses, sampled = f64([1, 2, 3], [10, 99, 99], [99, 99, 99]), mask("xxx", "x..", "...")
    assert aggregate(losses, sampled, reduction="sequence_sum").item() == 8.0  # 16 / 2
    actual = aggregate(losses, sampled, reduction="constant_length", denominator=2 * 4)
    assert actual.item() == 2.0  # 16 / (2 * 4): the third response has no token to count
    with pytest.raises(ValueError, match="max_response_tokens"):
        aggregate(losses, sampled, reduction="constant_length")
