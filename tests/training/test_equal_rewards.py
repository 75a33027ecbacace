"""Rewards that are all equal, or large, are told of in plain words, once in a run."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch

from tests.advantages.two_ranks import batch_of
from tests.integration.without_loss import Notebook
from tests.systems import system_config
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.poise import baseline_of
from vapo.config import FitConfig, resolve
from vapo.functional.advantages import whiten
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import Recording, left_to_learn
from vapo.training.minibatches import make_minibatches
from vapo.training.objective import has_loss
from vapo.types import EvaluatedBatch, Phase, TrainingBatch


def test_equal_rewards_are_said_once_and_different_ones_never() -> None:
    stream, nothing = io.StringIO(), torch.empty(0)
    with Progress(stream=stream, live=False, enabled=True) as progress:
        recording = Recording(Notebook(), progress)
        for rewards in (torch.tensor([1.0, -1.0]), torch.tensor([-1.0]), nothing):
            recording.note_rewards(rewards)
        assert stream.getvalue() == ""
        for reward in (-1.0, -1.0, 1.0):
            recording.note_rewards(torch.full((8,), reward))
    said = (
        "all 8 rewards are -1: there is nothing to learn from; look at responses with `vapo try`, "
        "or in the run's artifacts, in samples/"
    )
    assert stream.getvalue().count("nothing to learn") == 1
    assert said in stream.getvalue()


def test_what_equal_rewards_still_teach_is_said() -> None:
    """The policy is then trained on the right responses' LM loss alone, if it has one."""
    vapo, policy = system_config("vapo"), Phase.POLICY_OPTIMIZATION
    repeated = " but to repeat the right ones (components.positive_example_lm_loss)"
    assert left_to_learn(vapo, policy, accuracy=1.0) == repeated
    assert left_to_learn(vapo, policy, accuracy=0.0) == ""
    assert left_to_learn(vapo, Phase.VALUE_PRETRAINING, accuracy=1.0) == ""
    off = system_config("vapo", "components.positive_example_lm_loss.enabled=false")
    assert left_to_learn(off, policy, accuracy=1.0) == ""
    said = " but what vine compares them with"
    assert left_to_learn(system_config("vineppo"), policy, accuracy=0.0) == said
    stream = io.StringIO()
    with Progress(stream=stream, live=False, enabled=True) as progress:
        Recording(Notebook(), progress).note_rewards(torch.ones(8), repeated)
    assert f"all 8 rewards are 1: there is nothing to learn from{repeated}; look at" in (
        stream.getvalue()
    )


def noisy_batch(config: FitConfig, correct: list[bool]) -> EvaluatedBatch:
    """Values that differ from the mean reward by noise of 0.001."""
    noise = 1e-3 * torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    mean = sum(1.0 if is_right else -1.0 for is_right in correct) / 8
    return batch_of(config, correct, (mean + noise).tolist())


def trained(config: FitConfig, correct: list[bool]) -> TrainingBatch:
    batch = noisy_batch(config, correct)
    return estimate_advantages(
        batch, Phase.POLICY_OPTIMIZATION, config, baseline_of(config.algorithm)
    )


GROUPS = "components.group_sampling.group_size=2"


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("system", ["vapo", "tether", "evpo", "le_critique"])
def test_equal_rewards_train_nothing_but_the_right_responses(system: str, is_right: bool) -> None:
    config = system_config(system, GROUPS, "algorithm.whiten_advantages=true")
    batch = trained(config, [is_right] * 8)
    assert batch.advantages is not None
    assert batch.advantages.abs().max() == 0.0
    hp = replace(resolve(config), mu=0.1)
    (minibatch,) = make_minibatches(
        batch, num_minibatches=1, max_tokens=512, pad_id=0, layout="padded", seed=0
    )
    assert has_loss("actor", minibatch, hp, config.algorithm) == is_right, "its LM loss"
    assert not has_loss("actor", minibatch, replace(hp, mu=0.0), config.algorithm)
    assert has_loss("critic", minibatch, hp, config.algorithm), "which learns the constant"


def test_without_the_rule_noise_of_a_thousandth_is_trained_at_unit_size() -> None:
    """The negative control: the formula without the returns."""
    batch = trained(system_config("vapo", GROUPS), [False] * 8)
    assert batch.raw_advantages is not None
    raw, mask = batch.raw_advantages, batch.response_mask
    assert 1e-4 < float(raw[mask].std()) < 3e-3
    assert 0.95 < float(whiten(raw, mask)[mask].std()) < 1.05


def test_a_floor_keeps_small_advantages_small() -> None:
    """Values a thousandth off the returns, whose deviation is 1; a tenth of that makes 0.01."""
    correct = [True, False] * 4
    for floor, least, most in ((0.0, 0.9, 1.1), (0.1, 0.004, 0.04)):
        config = system_config("vapo", GROUPS, f"algorithm.whitening_floor={floor}")
        batch = noisy_batch(config, correct)
        batch = replace(batch, old_values=batch.values + batch.rewards[:, None])
        made = estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config)
        assert made.advantages is not None
        assert least < float(made.advantages.std()) < most


def test_large_rewards_are_said_once() -> None:
    stream = io.StringIO()
    with Progress(stream=stream, live=False, enabled=True) as progress:
        recording = Recording(Notebook(), progress)
        recording.note_rewards(torch.tensor([10.0, -10.0, 1.0]))
        assert stream.getvalue() == ""
        for _ in range(2):
            recording.note_rewards(torch.tensor([1.0, -100.0, 50.0]))
    assert stream.getvalue().count("a reward is -100: learning rates are chosen for") == 1
