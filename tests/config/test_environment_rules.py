"""Rules of `environment` and of GAE over turns: what episodes cannot be used with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import ROOT, fit_config
from tests.config.test_validation import CRITIC_FREE, problem
from vapo.commands.early_checks import check_early
from vapo.config import SftConfig
from vapo.config.critic_rules import gives_configured_rewards
from vapo.config.environments import EnvironmentConfig, EpisodeOptions
from vapo.config.kinds import option_names
from vapo.config.loading import load_config
from vapo.diagnostics.reward_weight import first_token_weight
from vapo.errors import UserError

EPISODES = ("environment.kind=function", "environment.function=my_games:Guess")
TURNS = "algorithm.gae_over=turns"
OTHER = {
    "max_turns": "3",
    "max_turn_tokens": "5",
    "max_observation_tokens": "7",
    "observation_template": "'<{observation}>'",
    "correct_above": "0.5",
    "timeout_s": "1",
    "max_processes": "2",
    "variables": "[SERPER_API_KEY]",
}


def test_the_block_itself_has_no_key_but_its_kind() -> None:
    assert option_names(EnvironmentConfig) == ["kind"]
    assert set(OTHER) == set(option_names(EpisodeOptions))


@pytest.mark.parametrize("name", OTHER)
def test_a_key_without_a_kind_cannot_be_written(tmp_path: Path, name: str) -> None:
    set_to = f"environment.{name}={OTHER[name]}"
    with pytest.raises(UserError) as error:
        fit_config(tmp_path, set_to)
    assert str(error.value) == (
        f"command line: unknown key 'environment.{name}' with environment.kind null: it is a key "
        f"of function, verifiers; set environment.kind, or leave environment.{name} out"
    )
    fit_config(tmp_path, set_to, *EPISODES)


def test_a_kind_that_is_taken_back_takes_its_keys_along() -> None:
    config = load_config(SftConfig, [ROOT / "conf/tug_of_war/sft.yaml"], ["environment.kind=null"])
    assert not config.environment.is_used
    assert config.environment == EnvironmentConfig()


def test_a_change_of_the_kind_keeps_what_both_have() -> None:
    config = load_config(
        SftConfig,
        [ROOT / "conf/tug_of_war/sft.yaml"],
        ["environment.kind=verifiers", "environment.id=say-word"],
    )
    assert config.environment.episode_options.max_turn_tokens == 4
    assert getattr(config.environment, "args") == {}  # noqa: B009


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.observation_template=none", "must contain {observation}"),
        ("environment.max_turn_tokens=101", "101 is above rollouts.max_response_tokens 100"),
        ("environment.function=no_path", "environment.function 'no_path' is not of the form"),
    ],
)
def test_a_cold_start_has_the_rules_of_its_environment(override: str, message: str) -> None:
    path = ROOT / "conf/tug_of_war/sft.yaml"
    load_config(SftConfig, [path], [])
    with pytest.raises(UserError, match=message):
        load_config(SftConfig, [path], [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.observation_template=none"], "'none' must contain {observation}"),
        (
            ["environment.max_turn_tokens=33", "rollouts.max_response_tokens=32"],
            "environment.max_turn_tokens 33 is above rollouts.max_response_tokens 32",
        ),
        (["rewards.shuffle=true"], "set rewards.shuffle=false"),
        (
            ["rewards.overlong.soft_punishment=true"],
            "set rewards.overlong.soft_punishment=false",
        ),
        (["critic.weights=prompt_noise"], "set critic.weights=none"),
        (
            ["algorithm.advantage_estimator=vine", *CRITIC_FREE],
            "vine continues responses from the middle of a text",
        ),
        (
            ["algorithm.advantage_estimator=greedy_baseline", *CRITIC_FREE],
            "greedy_baseline needs one greedy response",
        ),
        (
            [
                "algorithm.advantage_estimator=function",
                "algorithm.estimator_function=mine:estimate",
                "algorithm.estimator_uses_greedy_baseline=true",
                *CRITIC_FREE,
            ],
            "algorithm.estimator_uses_greedy_baseline=false, or environment.kind=null",
        ),
        (
            [TURNS, "algorithm.advantage_estimator=leave_one_out", *CRITIC_FREE],
            "the estimator is leave_one_out: set algorithm.gae_over=tokens",
        ),
        ([TURNS, "algorithm.baseline.kind=tether"], "set algorithm.baseline.kind=critic"),
        ([TURNS, "algorithm.baseline.kind=evpo"], "set algorithm.baseline.kind=critic"),
        ([TURNS, "critic.anchors=[0.5]"], "set critic.anchors=[]"),
        (
            [TURNS, "critic.count=2", "algorithm.agreement_mask_share=0.1"],
            "set algorithm.agreement_mask_share=0, or algorithm.gae_over=tokens",
        ),
    ],
)
def test_what_episodes_cannot_be_used_with(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    assert message in problem(tmp_path, *EPISODES, *overrides)


def test_turns_need_an_environment(tmp_path: Path) -> None:
    message = problem(tmp_path, TURNS)
    assert "without an environment a response is one turn: set environment.kind" in message
    fit_config(tmp_path, TURNS, *EPISODES)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.advantage_estimator=leave_one_out", *CRITIC_FREE],
        ["algorithm.advantage_estimator=group_relative", *CRITIC_FREE],
        [
            "algorithm.surrogate=dis",
            "components.group_sampling.group_size=1",
            "components.clip_higher.enabled=false",
        ],
        [TURNS, "algorithm.baseline.kind=linear_mix"],
        [TURNS, "critic.bootstrap_truncated=true"],
        ["rewards.overlong.filter_truncated=true", "critic.truncated=train"],
        ["algorithm.dynamic_sampling_attempts=2"],
    ],
)
def test_what_they_can_be_used_with(tmp_path: Path, overrides: list[str]) -> None:
    fit_config(tmp_path, *EPISODES, *overrides)


TASKS = ("data.train.kind=verifiers", "data.train.task=say-word", "data.train.num_examples=4")


def test_tasks_are_of_the_environment_that_plays_them(tmp_path: Path) -> None:
    for environment in ((), EPISODES, ("environment.kind=verifiers", "environment.id=other")):
        message = problem(tmp_path, *TASKS, *environment)
        assert "data.train.task say-word are tasks of an environment" in message
        assert "set environment.kind=verifiers and environment.id=say-word" in message
    config = fit_config(
        tmp_path,
        *TASKS,
        "data.train.task=${environment.id}",
        "environment.kind=verifiers",
        "environment.id=say-word",
    )
    assert getattr(config.data.train, "task") == "say-word"  # noqa: B009


def test_the_rewards_keys_say_nothing_of_an_environments(tmp_path: Path) -> None:
    """A verifier's rewards of -1 and 1 are not held against the range of the critic's head."""
    bounded = ("critic.head.kind=bounded", "critic.head.low=0", "rewards.verifier=exact")
    assert "the value targets reach from -1" in problem(tmp_path, *bounded)
    assert not gives_configured_rewards(fit_config(tmp_path, *bounded, *EPISODES))


def test_no_episode_is_made_to_answer_in_its_middle(tmp_path: Path) -> None:
    config = fit_config(tmp_path, *EPISODES)
    with pytest.raises(UserError, match=r"^actor.path"):  # it gets as far as the folders
        check_early("gates", config, {"answer_now": None})
    with pytest.raises(UserError, match=r"--answer_now ';' .* leave it out"):
        check_early("gates", config, {"answer_now": ";"})


def test_the_rewards_weight_is_over_turns(tmp_path: Path) -> None:
    """Of a constant lambda: 0.95^(9 - 1) in an episode of the most turns."""
    constant = ("components.length_adaptive_gae.enabled=false", "environment.max_turns=9")
    config = fit_config(tmp_path, *EPISODES, TURNS, *constant)
    weight, of = first_token_weight(config)
    assert weight == pytest.approx(0.95**8)
    assert of == "lambda_policy 0.95, 9 turns"
