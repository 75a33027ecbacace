"""Figures of the critic's values in an iteration, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.advantages.two_ranks import batch_of
from tests.systems import system_config
from vapo.advantages.estimators import estimate_advantages
from vapo.config import FitConfig, resolve
from vapo.diagnostics.iteration_metrics import others_mean_reward, value_metrics
from vapo.functional.columns import select_rows, with_loss_on
from vapo.types import EvaluatedBatch, Phase, TrainingBatch

RATIO = "critic/advantage_variance_ratio"
# Rewards 1 and -1 in the first group of two, 1 and 1 in the second.
CORRECT = [True, False, True, True]
VALUES = ((0.5, 1.0), (0.0, -1.0), (0.5, 1.0), (0.5, 1.0))


def config_of(*overrides: str) -> FitConfig:
    return system_config("vapo", "components.group_sampling.group_size=2", *overrides)


def estimated(
    config: FitConfig, batch: EvaluatedBatch | None = None, phase: Phase = Phase.POLICY_OPTIMIZATION
) -> TrainingBatch:
    return estimate_advantages(batch or batch_of(config, CORRECT, VALUES), phase, config)


def figures(
    config: FitConfig, batch: EvaluatedBatch | None = None, phase: Phase = Phase.POLICY_OPTIMIZATION
) -> dict[str, float]:
    return value_metrics(estimated(config, batch, phase), resolve(config))


def listed(column: torch.Tensor) -> Sequence[float]:
    rounded: list[float] = [round(x, 5) for x in column.tolist()]
    return rounded


def test_the_figures_by_hand() -> None:
    """R - V: .5, 0, -1, 0, .5, 0, .5, 0, mean 1/16; R - others: 2, -2, 0, 0 on two tokens each."""
    found = figures(config_of())
    variance = (3 * 0.5**2 + 1) / 8 - (1 / 16) ** 2
    assert found[RATIO] == pytest.approx(variance / 2)
    assert found["critic/value_bias"] == pytest.approx(-1 / 16)
    assert found["critic/value_bias_share"] == pytest.approx(1 / 16 / 0.75**0.5)


def test_the_gradients_noise_has_the_weights_of_the_sampled_probabilities() -> None:
    """The first token of each response was sampled at p = 1/2, the second was certain.

    R - V of the first tokens: .5, -1, .5, .5, less 1/16; R - others: 2, -2, 0, 0."""
    config = config_of()
    batch = batch_of(config, CORRECT, VALUES)
    logprobs = torch.tensor([[0.5, 1.0]]).log().expand(4, 2)
    metrics = figures(config, replace(batch, rollout_logprobs=logprobs))
    expected = (3 * (7 / 16) ** 2 + (17 / 16) ** 2) / 8
    assert metrics["critic/gradient_noise_ratio"] == pytest.approx(expected)
    over_turns = replace(resolve(config), gae_over="turns")
    assert "critic/gradient_noise_ratio" not in value_metrics(estimated(config), over_turns)


def test_any_lambda_baseline_and_phase() -> None:
    """The ratio is of lambda 1 whatever trains; value pretraining has no advantages."""
    other = config_of("components.length_adaptive_gae.enabled=false", "algorithm.lambda_policy=0.3")
    assert figures(other)[RATIO] == figures(config_of())[RATIO]
    mixed = config_of("algorithm.baseline.kind=linear_mix")
    assert figures(mixed)[RATIO] == figures(config_of())[RATIO]
    pretraining = figures(config_of(), phase=Phase.VALUE_PRETRAINING)
    assert RATIO not in pretraining
    assert pretraining["critic/value_bias"] == pytest.approx(-1 / 16)


def test_gammas_returns() -> None:
    """Gamma 1/2: R 1/2, 1, -1/2, -1, ...; the baseline stays the mean reward."""
    found = figures(config_of("algorithm.gamma=0.5"))
    by_critic = torch.tensor([0.0, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0]).var(correction=0)
    by_others = torch.tensor([1.5, 2.0, -1.5, -2.0, -0.5, 0.0, -0.5, 0.0]).var(correction=0)
    assert found[RATIO] == pytest.approx(float(by_critic / by_others))
    assert found["critic/value_bias"] == pytest.approx(0.0625)


def test_one_response_a_prompt_is_held_against_all_others() -> None:
    """The means of the three others: 1/3, 1, 1/3, 1/3."""
    alone = "components.group_sampling.enabled=false"
    config = config_of(alone)
    batch = replace(batch_of(config, CORRECT, VALUES), group_size=1)
    assert listed(others_mean_reward(estimated(config, batch))) == [0.33333, 1.0, 0.33333, 0.33333]


def test_what_left_the_batch_took_its_part_of_the_group_along() -> None:
    """Of the second group one is left, whose others are those of the first."""
    config = config_of()
    batch = select_rows(batch_of(config, CORRECT, VALUES), [0, 1, 3])
    assert listed(others_mean_reward(estimated(config, batch))) == [-1.0, 1.0, 0.0]
    assert figures(config, batch)[RATIO] > 0


def test_fillers_are_not_counted() -> None:
    config = config_of()
    batch = batch_of(config, CORRECT, VALUES)
    filled = with_loss_on(batch, torch.tensor([True, True, False, False]))
    assert figures(config, filled)[RATIO] == figures(config, select_rows(batch, [0, 1]))[RATIO]
    alone = with_loss_on(replace(batch, group_size=1), torch.tensor([True, False, True, True]))
    config = config_of("components.group_sampling.enabled=false")
    assert listed(others_mean_reward(estimated(config, alone)))[0] == 1.0


def test_over_turns_the_figures_are_of_the_turns() -> None:
    """A response to a verifier is one turn: R - V .5, -1, .5, .5, and R - others 2, -2, 0, 0."""
    config = config_of()
    found = value_metrics(estimated(config), replace(resolve(config), gae_over="turns"))
    variance = (3 * 0.5**2 + 1) / 4 - (1 / 8) ** 2
    assert found[RATIO] == pytest.approx(variance / 2)


def test_rewards_that_are_equal_have_no_ratio() -> None:
    config = config_of()
    found = figures(config, batch_of(config, [True] * 4, VALUES))
    assert found[RATIO] != found[RATIO]
    assert found["critic/value_bias_share"] != found["critic/value_bias_share"]
    assert found["critic/value_bias"] == pytest.approx(-4.5 / 8)
