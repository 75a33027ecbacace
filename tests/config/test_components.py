"""The seven switches and what they resolve to."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from vapo.config import Components, FitConfig, Hyperparameters, resolve
from vapo.config.schema import AlgorithmConfig

OWNED = {
    "value_pretraining": {"value_pretraining_iterations"},
    "decoupled_gae": {"lambda_critic"},
    "length_adaptive_gae": {"alpha"},
    "token_level_loss": {"loss_reduction"},
    "clip_higher": {"eps_high"},
    "positive_example_lm_loss": {"mu"},
    "group_sampling": {"num_prompts", "group_size"},
}
STATES = list(itertools.product([False, True], repeat=7))


def with_switches(state: tuple[bool, ...], config: FitConfig | None = None) -> FitConfig:
    config = config or FitConfig()
    components = dataclasses.replace(
        config.components,
        **{
            name: dataclasses.replace(getattr(config.components, name), enabled=is_on)
            for name, is_on in zip(OWNED, state, strict=True)
        },
    )
    return dataclasses.replace(config, components=components)


def changed(first: Hyperparameters, second: Hyperparameters) -> set[str]:
    before, after = dataclasses.asdict(first), dataclasses.asdict(second)
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize("state", STATES, ids=lambda s: "".join("01"[on] for on in s))
def test_flipping_one_switch_changes_exactly_its_own_values(state: tuple[bool, ...]) -> None:
    here = resolve(with_switches(state))
    for index, owned in enumerate(OWNED.values()):
        flipped = tuple(on != (i == index) for i, on in enumerate(state))
        assert changed(here, resolve(with_switches(flipped))) == owned


def test_all_on_is_the_paper() -> None:
    assert resolve(with_switches((True,) * 7)) == Hyperparameters(
        value_pretraining_iterations=50,
        lambda_critic=1.0,
        alpha=0.05,
        k=None,
        loss_reduction="token_mean",
        eps_high=0.28,
        mu=0.1,
        num_prompts=512,
        group_size=16,
        lambda_policy=0.95,
        eps_low=0.2,
        gamma=1.0,
    )


def test_all_off_is_vanilla_ppo() -> None:
    assert resolve(with_switches((False,) * 7)) == Hyperparameters(
        value_pretraining_iterations=0,
        lambda_critic=None,
        alpha=None,
        k=None,
        loss_reduction="sequence_mean",
        eps_high=0.2,
        mu=0.0,
        num_prompts=8192,
        group_size=1,
        lambda_policy=0.95,
        eps_low=0.2,
        gamma=1.0,
    )


def test_off_follows_the_algorithm_not_a_constant() -> None:
    algorithm = AlgorithmConfig(eps_low=0.1, lambda_policy=0.9, gamma=0.99)
    numbers = resolve(with_switches((False,) * 7, FitConfig(algorithm=algorithm)))
    assert (numbers.eps_high, numbers.lambda_policy, numbers.gamma) == (0.1, 0.9, 0.99)


def test_defaults_are_the_papers() -> None:
    config = FitConfig()
    assert resolve(config) == resolve(with_switches((True,) * 7))
    assert (config.actor.optimizer.lr, config.critic.optimizer.lr) == (1e-6, 2e-6)
    assert config.training.minibatch_size == 512
    evaluation = config.evaluation
    assert (evaluation.k, evaluation.temperature, evaluation.top_p) == (32, 1.0, 0.7)
    assert config.algorithm.kl.coef == config.algorithm.entropy_coef == 0.0
    assert config.critic.value_clip is config.algorithm.dual_clip is None
    assert config.critic.init == "reward_model"


def test_the_seven_components_by_name() -> None:
    assert [field.name for field in dataclasses.fields(Components)] == list(OWNED)


@pytest.mark.parametrize("name", OWNED)
def test_component_is_frozen_and_starts_with_enabled(name: str) -> None:
    component: Any = getattr(Components(), name)
    assert dataclasses.fields(component)[0].name == "enabled"
    assert component.enabled is True
    with pytest.raises(dataclasses.FrozenInstanceError):
        component.enabled = False
