"""Rules between the keys that name a user's own estimator and value head."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from vapo.config.schema import AlgorithmConfig
from vapo.errors import UserError

NO_CRITIC = (
    "components.value_pretraining.enabled=false",
    "components.decoupled_gae.enabled=false",
    "components.length_adaptive_gae.enabled=false",
)
OWN = ("algorithm.advantage_estimator=function", "algorithm.estimator_function=mine:estimate")
HEAD = "critic.head_function=mine:make_head"


def problem(folder: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        fit_config(folder, *overrides)
    return str(caught.value)


def test_an_own_estimator_says_what_it_needs(tmp_path: Path) -> None:
    algorithm = fit_config(tmp_path, *OWN, *NO_CRITIC).algorithm
    needs = (algorithm.has_critic, algorithm.compares_groups, algorithm.needs_greedy_baseline)
    assert needs == (False, True, False)
    algorithm = fit_config(
        tmp_path,
        *OWN,
        "algorithm.estimator_uses_critic=true",
        "algorithm.estimator_compares_groups=false",
        "algorithm.estimator_uses_greedy_baseline=true",
    ).algorithm
    needs = (algorithm.has_critic, algorithm.compares_groups, algorithm.needs_greedy_baseline)
    assert needs == (True, False, True)


@pytest.mark.parametrize(
    "unused",
    [
        "estimator_function=mine:estimate",
        "estimator_args={a: 1}",
        "estimator_uses_critic=true",
        "estimator_compares_groups=false",
        "estimator_uses_greedy_baseline=true",
        "estimator_reads_layers=[0]",
    ],
)
def test_an_option_that_the_kind_does_not_read_is_refused(tmp_path: Path, unused: str) -> None:
    key = f"algorithm.{unused.partition('=')[0]}"
    expected = (
        f"unknown key '{key}' with algorithm.advantage_estimator 'gae': it is a key of function"
    )
    assert expected in problem(tmp_path, f"algorithm.{unused}")


def test_a_layer_with_another_estimator_forgets_the_functions_keys(tmp_path: Path) -> None:
    overlay = "algorithm: {advantage_estimator: function, estimator_function: 'mine:estimate'}\n"
    config = fit_config(tmp_path, "algorithm.advantage_estimator=gae", overlay=overlay)
    assert config.algorithm == AlgorithmConfig()


def test_a_function_is_named_in_full(tmp_path: Path) -> None:
    function = "algorithm.advantage_estimator=function"
    assert "needs algorithm.estimator_function" in problem(tmp_path, function, *NO_CRITIC)
    for path in ("mine", "mine.estimate", "mine:", "my module:f"):
        message = problem(tmp_path, function, f"algorithm.estimator_function='{path}'", *NO_CRITIC)
        assert "is not of the form package.module:function" in message
    assert "is not of the form" in problem(tmp_path, "critic.head_function=mine.make_head")
    environment = ("environment.kind=function", "environment.function=mine.Environment")
    assert "environment.function 'mine.Environment' is not of the form" in problem(
        tmp_path, *environment
    )


def test_the_components_and_groups_that_it_needs(tmp_path: Path) -> None:
    assert "or algorithm.estimator_uses_critic=true" in problem(tmp_path, *OWN)
    single = "components.group_sampling.group_size=1"
    message = problem(tmp_path, *OWN, *NO_CRITIC, single)
    assert "or algorithm.estimator_compares_groups to false" in message
    fit_config(tmp_path, *OWN, *NO_CRITIC, single, "algorithm.estimator_compares_groups=false")


def test_the_states_that_it_reads_are_not_also_a_probes(tmp_path: Path) -> None:
    reads = "algorithm.estimator_reads_layers=[-1,0]"
    algorithm = fit_config(tmp_path, *OWN, *NO_CRITIC, reads).algorithm
    assert algorithm.read_layers == (-1, 0)
    probe = ("critic.kind=probe", "critic.init=policy", "algorithm.estimator_uses_critic=true")
    assert fit_config(tmp_path, *OWN, *probe).algorithm.read_layers == ()
    message = problem(tmp_path, *OWN, *probe, reads)
    assert "both choose the actor's states that a batch has" in message


def test_an_own_head_needs_an_untrained_critic_in_one_process(tmp_path: Path) -> None:
    assert fit_config(tmp_path, HEAD).critic.head_function == "mine:make_head"
    chosen = "algorithm.advantage_estimator=group_relative"
    assert "has no critic" in problem(tmp_path, HEAD, chosen, *NO_CRITIC)
    reward_model = ("critic.init=reward_model", "critic.reward_model_path=some/model")
    for start in (reward_model, ["critic.init=some/critic"]):
        assert "brings a trained value head" in problem(tmp_path, HEAD, *start)
    message = problem(tmp_path, HEAD, "trainer.strategy=fsdp")
    assert "critic.head_function is not supported with trainer.strategy=fsdp" in message
