"""Continuations as value targets: through the advantage stage and the value loss, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.advantages.test_critic_targets import assert_same, cut, evaluated, listed, loss_of
from tests.systems import system_config
from vapo.advantages.estimators import estimate_advantages
from vapo.config import FitConfig
from vapo.training.objective import Totals, value_objective
from vapo.types import EvaluatedBatch, Phase, TrainingBatch

PRETRAINING = "components.value_pretraining"
TRUTH = (f"{PRETRAINING}.data=f", f"{PRETRAINING}.targets=truth")
MEANS = torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
DRAWS = torch.tensor([[4.0, 0.0, 0.0], [0.0, 1.5, 0.0]])
# returns -1 and 1: (4 * 0.5 - 1) / 5, and (1.5 * 0 + 1) / 2.5
TARGETS = [[0.2, -1.0, -1.0], [1.0, 0.4, 0.0]]
# of the values 0.2, 0.5, 0.8 and 0.1, 0.3
SQUARES = [[0.0, 1.5**2, 1.8**2], [0.9**2, 0.1**2]]


def with_means(batch: EvaluatedBatch) -> EvaluatedBatch:
    return replace(batch, measured_values=MEANS, measured_draws=DRAWS)


def taught(*overrides: str) -> tuple[TrainingBatch, FitConfig]:
    config = system_config("vapo", *TRUTH, *overrides)
    batch = with_means(evaluated(config))
    return estimate_advantages(batch, Phase.VALUE_PRETRAINING, config), config


def test_a_target_counts_as_often_as_it_has_returns() -> None:
    made, config = taught()
    assert listed(made.value_targets) == TARGETS
    assert listed(made.value_draws) == [[5.0, 1.0, 1.0], [1.0, 2.5, 1.0]]
    (minibatch,) = cut(made)
    assert minibatch.num_value_tokens == 5
    assert minibatch.num_value_draws == 10.5
    total = SQUARES[0][1] + SQUARES[0][2] + SQUARES[1][0] + 2.5 * SQUARES[1][1]
    assert loss_of(made, config) == pytest.approx(0.5 * total / 10.5)


def test_or_once_as_any_other() -> None:
    made, config = taught(f"{PRETRAINING}.truth_weight=none")
    assert listed(made.value_targets) == TARGETS
    assert made.value_draws.eq(1).all()
    (minibatch,) = cut(made)
    assert minibatch.num_value_draws == 5
    assert loss_of(made, config) == pytest.approx(0.5 * sum(map(sum, SQUARES)) / 5)


def test_or_they_alone() -> None:
    made, config = taught(f"{PRETRAINING}.truth_weight=only")
    assert made.value_mask.tolist() == [[True, False, False], [False, True, False]]
    (minibatch,) = cut(made)
    assert minibatch.num_value_tokens == 2
    assert minibatch.num_value_draws == 7.5
    assert loss_of(made, config) == pytest.approx(0.5 * 2.5 * SQUARES[1][1] / 7.5)


def test_the_returns_are_discounted_and_the_rewards_are_the_critics() -> None:
    """gamma 0.5: -1/4, -1/2, -1 and 1/2, 1; the mean of the continuations is as it was measured."""
    made, _ = taught("algorithm.gamma=0.5")
    assert listed(made.value_targets) == [[0.35, -0.5, -1.0], [0.5, 0.4, 0.0]]
    shaped = ("rewards.overlong.soft_punishment=true", "rewards.overlong.cache_tokens=2")
    made, _ = taught(*shaped)
    assert listed(made.value_targets)[0] == [0.1, -1.5, -1.5]
    made, _ = taught(*shaped, "critic.reward=unshaped")
    assert listed(made.value_targets)[0] == TARGETS[0]


def test_weights_of_responses_multiply_them() -> None:
    made, config = taught()
    weighed = replace(made, value_weights=torch.tensor([2.0, 3.0]))
    total = 2 * (SQUARES[0][1] + SQUARES[0][2]) + 3 * (SQUARES[1][0] + 2.5 * SQUARES[1][1])
    assert loss_of(weighed, config) == pytest.approx(0.5 * total / 10.5)


def test_the_cross_entropy_counts_them_too() -> None:
    """Two bins at -1 and 1: one with the values' odds, so that only the weights differ."""
    bins = (
        *("critic.head.kind=categorical", "critic.head.num_bins=2", "critic.loss=cross_entropy"),
        *("critic.head.support=inclusive", "critic.head.targets=two_hot"),
        *("critic.head.low=-1", "critic.head.high=1"),
    )
    made, config = taught(*bins)
    logits = torch.zeros(2, 3, 2)
    logits[..., 1] = 1.0
    low, high = (-torch.log_softmax(torch.tensor([0.0, 1.0]), dim=0)).tolist()

    def entropy(target: float) -> float:
        return low * (1 - target) / 2 + high * (1 + target) / 2

    num = [5.0, 1.0, 1.0, 1.0, 2.5]
    targets = [*TARGETS[0], *TARGETS[1][:2]]
    expected = sum(n * entropy(y) for n, y in zip(num, targets, strict=True)) / 10.5
    (minibatch,) = cut(made)
    output = {"values": torch.zeros(2, 3), "logits": logits}
    assert float(value_objective(output, made, minibatch, config, Totals())) == pytest.approx(
        expected
    )


def test_nothing_else_changes() -> None:
    """Without continuations, and in the policy phase, the batch is what it was, bit for bit."""
    plain = system_config("vapo", f"{PRETRAINING}.data=f")
    truth = system_config("vapo", *TRUTH)
    batch = evaluated(plain)
    for phase in Phase:
        assert_same(
            estimate_advantages(batch, phase, truth), estimate_advantages(batch, phase, plain)
        )
    phase = Phase.POLICY_OPTIMIZATION
    made = estimate_advantages(with_means(batch), phase, truth)
    assert made.value_draws.eq(1).all()
    without = replace(made, measured_values=None, measured_draws=None)
    assert_same(without, estimate_advantages(batch, phase, plain))
