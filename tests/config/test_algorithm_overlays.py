"""What the overlays of `conf/algorithm` resolve to, and the rules between their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tests.config.fits import ROOT, fit_config
from tests.config.test_validation import CRITIC_FREE as NO_CRITIC
from tests.config.test_validation import problem
from tests.systems import CONF, CRITIC_FREE, SYSTEMS, system_config
from vapo.advantages.estimators import ESTIMATORS
from vapo.config import Components, FitConfig, resolve
from vapo.config.algorithm import COMPARES_GROUPS, AlgorithmConfig
from vapo.config.flattening import flatten
from vapo.config.hyperparameters import Hyperparameters
from vapo.config.loading import load_config

SWITCHES = [f"components.{name}.enabled" for name in get_type_hints(Components)]
SIZES = ("training.", "components.group_sampling.num_prompts", "components.group_sampling.group")
LEFT_TO_THE_TASK = (*SIZES, "data.", "rollouts.", "evaluation.", "trainer.", "seed", "output_dir")


def default(*overrides: str) -> FitConfig:
    return load_config(FitConfig, [ROOT / "conf/vapo.yaml"], list(overrides))


def values(config: FitConfig) -> dict[str, Any]:
    """Every resolved value; the run's name and tags are the system's own."""
    return {k: v for k, v in flatten(config).items() if not k.startswith("tracking.")}


def test_there_is_an_overlay_for_every_system() -> None:
    assert {path.stem for path in CONF.glob("algorithm/*.yaml")} == set(SYSTEMS)


def test_all_on_is_the_vapo_overlay() -> None:
    all_on = default(*(f"{switch}=true" for switch in SWITCHES))
    assert values(system_config("vapo")) == values(all_on)
    assert resolve(system_config("vapo")) == resolve(all_on)


def test_all_off_is_the_ppo_overlay() -> None:
    all_off = default(*(f"{switch}=false" for switch in SWITCHES))
    assert values(system_config("ppo")) == values(all_off)
    assert resolve(system_config("ppo")) == resolve(all_off)


def test_vapo_and_ppo_do_not_lean_on_the_base() -> None:
    """The papers' scale-free values hold whatever the base config says."""
    base = [
        "algorithm.gamma=0.9",
        "algorithm.lambda_policy=0.5",
        "algorithm.eps_low=0.1",
        "algorithm.whiten_advantages=false",
        "algorithm.entropy_coef=0.1",
        "algorithm.kl.coef=0.1",
        "algorithm.value_clip=0.5",
        "components.clip_higher.eps_high=0.5",
        "components.positive_example_lm_loss.mu=0.7",
        "components.decoupled_gae.lambda_critic=0.5",
    ]
    changed = default(*base)
    for system in ("vapo", "ppo"):
        over = load_config(FitConfig, [CONF / "vapo.yaml", CONF / f"algorithm/{system}.yaml"], [])
        numbers = resolve(over)
        assert numbers.gamma == 1.0
        assert numbers.eps_low == 0.2
        assert numbers.eps_high == (0.28 if system == "vapo" else 0.2)
        assert numbers.mu == (0.1 if system == "vapo" else 0.0)
        assert numbers.lambda_critic == (1.0 if system == "vapo" else None)
        assert numbers.lambda_policy == 0.95
    assert resolve(changed).eps_low == 0.1


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_overlay_leaves_sizes_to_the_task(system: str) -> None:
    base, over = values(default()), values(system_config(system))
    changed = {key for key in base if base[key] != over[key] and key.startswith(LEFT_TO_THE_TASK)}
    demanded = {"rloo": {"training.minibatch_size"}, "remax": {"training.minibatch_size"}}
    assert changed == demanded.get(system, set())
    assert "actor.optimizer.lr" not in {key for key in base if base[key] != over[key]}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_carries_its_systems_name(system: str) -> None:
    tracking = system_config(system, "seed=3").tracking
    assert tracking.run_name == f"{system}-seed3"
    assert tracking.tags == {"system": system}


@pytest.mark.parametrize("system", SYSTEMS)
def test_critic(system: str) -> None:
    config = system_config(system)
    assert config.algorithm.has_critic == (system not in CRITIC_FREE)
    if system in CRITIC_FREE:
        numbers = resolve(config)
        assert (numbers.value_pretraining_iterations, numbers.lambda_critic, numbers.alpha) == (
            0,
            None,
            None,
        )


EXPECTED = {  # estimator, surrogate, reduction, eps_high, whitening, KL
    "grpo": ("group_relative", "clipped_ratio", "sequence_mean", 0.2, False, "k3 loss"),
    "dr_grpo": ("group_mean", "clipped_ratio", "constant_length", 0.2, False, None),
    "dapo": ("group_relative", "clipped_ratio", "token_mean", 0.28, False, None),
    "rloo": ("leave_one_out", "logprob", "sequence_sum", 0.2, False, "k1 reward"),
    "reinforce_pp": ("reward_to_go", "clipped_ratio", "sequence_mean", 0.2, True, "k1 reward"),
    "reinforce_pp_baseline": (
        *("group_mean_whitened", "clipped_ratio", "sequence_mean", 0.2, False),
        "k2 loss",
    ),
    "remax": ("greedy_baseline", "logprob", "sequence_sum", 0.2, False, "k1 reward"),
    "raft": ("correct_only", "logprob", "token_mean", 0.2, False, None),
    "vc_ppo": ("gae", "clipped_ratio", "sequence_mean", 0.2, False, None),
}


@pytest.mark.parametrize("system", EXPECTED)
def test_structure(system: str) -> None:
    config = system_config(system)
    algorithm, numbers = config.algorithm, resolve(config)
    kl = algorithm.kl
    assert EXPECTED[system] == (
        algorithm.advantage_estimator,
        algorithm.surrogate,
        numbers.loss_reduction,
        numbers.eps_high,
        algorithm.whiten_advantages,
        f"{kl.estimator} {kl.placement}" if kl.coef > 0 else None,
    )
    assert numbers.mu == 0.0
    assert (config.rewards.correct, config.rewards.incorrect) == (1.0, -1.0)


def test_dapo_has_all_of_its_parts() -> None:
    config = system_config("dapo")
    overlong = config.rewards.overlong
    assert (overlong.filter_truncated, overlong.soft_punishment) == (True, True)
    assert overlong.ramp_tokens(20480) == 4096  # the paper's
    assert overlong.ramp_tokens(config.rollouts.max_response_tokens) == 6
    assert config.algorithm.dynamic_sampling_attempts > 1
    optimizer = config.actor.optimizer
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.1, 1.0)


def test_vc_ppo_is_the_algorithm_box() -> None:
    numbers: Hyperparameters = resolve(system_config("vc_ppo"))
    assert numbers.value_pretraining_iterations > 0
    assert (numbers.lambda_policy, numbers.alpha, numbers.lambda_critic) == (0.95, None, 1.0)


def test_names_of_the_config_are_those_of_the_tables() -> None:
    hints = get_type_hints(AlgorithmConfig)
    assert set(get_args(hints["advantage_estimator"])) == {*ESTIMATORS, "function"}
    assert set(get_args(hints["surrogate"])) == {"clipped_ratio", "logprob", "dis", "dppo_tv"}, (
        "else the objective takes it for clipped_ratio"
    )
    assert set(COMPARES_GROUPS) < set(ESTIMATORS)


# ---- rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["group_mean", "group_mean_whitened"])
def test_group_estimators_need_groups(tmp_path: Path, estimator: str) -> None:
    chosen = f"algorithm.advantage_estimator={estimator}"
    single = "components.group_sampling.group_size=1"
    assert "compares the responses of a group" in problem(tmp_path, chosen, single, *NO_CRITIC)
    fit_config(tmp_path, chosen, *NO_CRITIC)


@pytest.mark.parametrize("estimator", ["reward_to_go", "greedy_baseline", "correct_only"])
def test_the_others_do_not(tmp_path: Path, estimator: str) -> None:
    single = "components.group_sampling.enabled=false"
    chosen = f"algorithm.advantage_estimator={estimator}"
    fit_config(tmp_path, chosen, single, *NO_CRITIC)
    assert "has no critic" in problem(tmp_path, chosen, single)


@pytest.mark.parametrize(
    "single",
    ["components.group_sampling.group_size=1", "components.group_sampling.enabled=false"],
)
def test_dynamic_sampling_needs_groups(tmp_path: Path, single: str) -> None:
    message = problem(tmp_path, "algorithm.dynamic_sampling_attempts=2", single)
    assert "algorithm.dynamic_sampling_attempts 2 drops prompts" in message
    assert "components.group_sampling.group_size to 2 or more" in message
    fit_config(tmp_path, "algorithm.dynamic_sampling_attempts=2")


def test_the_logprob_surrogate_needs_one_step_an_iteration(tmp_path: Path) -> None:
    chosen = (
        "algorithm.surrogate=logprob",
        "algorithm.advantage_estimator=leave_one_out",
        "components.clip_higher.enabled=false",
        *NO_CRITIC,
    )
    assert "training.minibatch_size=null" in problem(tmp_path, *chosen)
    fit_config(tmp_path, *chosen, "training.minibatch_size=null")
    fit_config(tmp_path, *chosen, "training.minibatch_size=8192")
    fit_config(tmp_path, *chosen, "algorithm.advantage_estimator=correct_only")


@pytest.mark.parametrize(
    ("override", "mend"),
    [
        ("components.clip_higher.enabled=true", "components.clip_higher.enabled=false"),
        ("algorithm.dual_clip=3", "algorithm.dual_clip=null"),
    ],
)
def test_clip_options_need_a_ratio(tmp_path: Path, override: str, mend: str) -> None:
    chosen = (
        "algorithm.surrogate=logprob",
        "training.minibatch_size=null",
        "components.clip_higher.enabled=false",
    )
    message = problem(tmp_path, *chosen, override)
    assert "no ratio to clip" in message
    assert message.endswith(f"set {mend}")
    fit_config(tmp_path, *chosen)


@pytest.mark.parametrize("reduction", ["sum", "constant_length"])
def test_a_sequence_reduction_needs_the_sequence_level_loss(tmp_path: Path, reduction: str) -> None:
    chosen = f"algorithm.sequence_reduction={reduction}"
    message = problem(tmp_path, chosen)
    assert message.endswith("set components.token_level_loss.enabled=false")
    fit_config(tmp_path, chosen, "components.token_level_loss.enabled=false")
    fit_config(tmp_path, "algorithm.sequence_reduction=mean")


def test_the_ramp_defaults_to_a_fifth(tmp_path: Path) -> None:
    on = "rewards.overlong.soft_punishment=true"
    overlong = fit_config(tmp_path, on).rewards.overlong
    assert [overlong.ramp_tokens(n) for n in (20480, 32, 3)] == [4096, 6, 1]
    given = fit_config(tmp_path, on, "rewards.overlong.cache_tokens=7").rewards.overlong
    assert given.ramp_tokens(20480) == 7
