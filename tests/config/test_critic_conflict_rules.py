"""Rules between the critic's options: each is refused with its reason, and its mend is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.config.test_validation import CRITIC_FREE as NO_CRITIC
from tests.config.test_validation import problem
from tests.systems import CONF, CRITIC_FREE, mostly_slow, system_config
from vapo.config import FitConfig
from vapo.config.critic import CriticConfig
from vapo.config.critic_rules import NOT_A_METHOD, critic_options_have_a_critic
from vapo.config.loading import load_config
from vapo.config.validation import RULES

NO_CLIP = "components.clip_higher.enabled=false"
SINGLE = "components.group_sampling.enabled=false"
CATEGORICAL = "critic.head.kind=categorical"
OPTIONS = {  # one value of each option that a critic-free system would ignore, and the mend
    "critic.kind=probe critic.probe.layers=[1]": "critic.kind=network",
    "critic.frozen=[self_attn.]": "critic.frozen=[]",
    "critic.lora.rank=4": "critic.lora=null",
    "critic.head.kind=bounded": "critic.head.kind=scalar",
    "critic.head.start=first_batch": "critic.head.start=as_loaded",
    "critic.loss=cross_entropy": "critic.loss=squared_error",
    "critic.target=residual": "critic.target=return",
    "critic.weights=prompt_noise": "critic.weights=none",
    "critic.anchors=[0.5]": "critic.anchors=[]",
    "critic.late_anchor=0.95": "critic.late_anchor=null",
    "critic.late_anchor_tokens=9": "critic.late_anchor_tokens=6144",
    "critic.reward=unshaped": "critic.reward=shaped",
    "critic.truncated=train": "critic.truncated=as_policy",
    "critic.bootstrap_truncated=true": "critic.bootstrap_truncated=false",
    "critic.num_minibatches=4": "critic.num_minibatches=null",
    "critic.prompt.kind=privileged critic.prompt.template='{answer}{prompt}'": (
        "critic.prompt.kind=policy"
    ),
    "critic.count=2": "critic.count=1",
    "critic.head_function=mine:head": "critic.head_function=null",
    "critic.value_clip=0.2": "critic.value_clip=null",
    "algorithm.agreement_mask_share=0.1": "algorithm.agreement_mask_share=0.0",
    "algorithm.disagreement_mask_share=0.1": "algorithm.disagreement_mask_share=0.0",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_critics_option_needs_a_critic(tmp_path: Path, option: str) -> None:
    chosen = ("algorithm.advantage_estimator=leave_one_out", *NO_CRITIC)
    message = problem(tmp_path, *chosen, *option.split())
    assert "has no effect: algorithm.advantage_estimator leave_one_out has no critic" in message
    assert message.endswith(f"set {OPTIONS[option]}")


def test_without_a_critic_each_mend_is_accepted(tmp_path: Path) -> None:
    chosen = ("algorithm.advantage_estimator=leave_one_out", *NO_CRITIC)
    fit_config(tmp_path, *chosen, *OPTIONS.values())


def test_every_option_of_the_critic_is_refused_or_named_as_harmless() -> None:
    """A new key of the block is refused without a critic from its first day."""
    refused = {option.split("=")[0].split(".")[1] for option in OPTIONS if "critic." in option}
    assert refused | NOT_A_METHOD == set(vars(CriticConfig()))
    assert not refused & NOT_A_METHOD


OF_A_NETWORK = {
    "critic.layers=2": "critic.layers=null",
    "critic.head_function=mine:head": "critic.head_function=null",
    "critic.lora.rank=4": "critic.lora=null",
    "critic.frozen=[self_attn.]": "critic.frozen=[]",
    "critic.attn_implementation=eager": "critic.attn_implementation=auto",
    "critic.prompt.kind=privileged critic.prompt.template='{answer}{prompt}'": (
        "critic.prompt.kind=policy"
    ),
}


@pytest.mark.parametrize("option", OF_A_NETWORK)
def test_a_probe_has_no_network(tmp_path: Path, option: str) -> None:
    message = problem(tmp_path, "critic.kind=probe", "critic.init=policy", *option.split())
    assert "is for a critic with a network, but critic.kind probe has no network" in message
    assert message.endswith(f"set {OF_A_NETWORK[option]}, or critic.kind=network")
    fit_config(tmp_path, "critic.kind=probe", "critic.init=policy", *OF_A_NETWORK.values())


def test_a_probe_starts_from_no_reward_model_and_reads_some_layer(tmp_path: Path) -> None:
    message = problem(tmp_path, "critic.kind=probe", "critic.init=reward_model")
    assert message.endswith("set critic.init=policy, or critic.init to the folder of a saved probe")
    for layers in ("[]", "[1,1]"):
        options = ("critic.kind=probe", "critic.init=policy", f"critic.probe.layers={layers}")
        assert "must name one layer of the actor or more, each once" in problem(tmp_path, *options)


RIDGE = ("critic.ridge.penalty=0.1", "critic.init=policy")
PROBE = ("critic.kind=probe",)
COLUMNS = ("critic.sampled_logprobs={}",)
NOT_FITTED = {
    (*PROBE, "critic.head.kind=bounded"): "set critic.head.kind=scalar, or critic.ridge=null",
    (*COLUMNS, "critic.head.kind=categorical"): "critic.head.kind=scalar, or critic.ridge=null",
    (*COLUMNS, "critic.dtype=bfloat16"): "set critic.dtype=float32, or critic.ridge=null",
    (*PROBE, "critic.probe.hidden_size=8"): "critic.probe.hidden_size=null, or critic.ridge=null",
    (*PROBE, "critic.epochs=2"): "fits a probe without optimizer steps; set critic.epochs=1",
    (*PROBE, "critic.num_minibatches=2"): "optimizer steps; set critic.num_minibatches=null",
    (*PROBE, "critic.value_clip=0.5"): "optimizer steps; set critic.value_clip=null",
    (): "set critic.sampled_logprobs={}, critic.kind=probe, or critic.ridge=null",
    (*COLUMNS, "critic.frozen=[score]"): "score.bias): leave it out, or set critic.ridge=null",
}


@pytest.mark.parametrize("options", NOT_FITTED)
def test_a_regression_fits_linear_weights_alone(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert problem(tmp_path, *RIDGE, *options).endswith(NOT_FITTED[options])


def test_a_regression_goes_with_these(tmp_path: Path) -> None:
    for options in (PROBE, (*PROBE, *COLUMNS), COLUMNS, (*COLUMNS, "critic.frozen=[self_attn.]")):
        fit_config(tmp_path, *RIDGE, *options)
    fit_config(tmp_path, *RIDGE, *COLUMNS, "critic.epochs=2", "critic.value_clip=0.5")


RESIDUAL = "critic.target=residual"
NO_RESIDUAL = {
    "algorithm.gamma=0.99": "set algorithm.gamma=1, or critic.target=return",
    "components.group_sampling.group_size=1": "enabled to true, or critic.target=return",
    SINGLE: "enabled to true, or critic.target=return",
    "critic.head.start=first_batch": "mean_reward=0, or critic.head.start=as_loaded",
    "critic.head.start=mean_reward critic.head.mean_reward=0.5": "critic.head.start=as_loaded",
    "critic.bootstrap_truncated=true": "critic.target=return, or critic.bootstrap_truncated=false",
    "critic.head.kind=bounded": "lower critic.head.low or raise critic.head.high",
    "critic.head.kind=bounded critic.head.low=-2 critic.head.high=1.9": "raise critic.head.high",
}


@pytest.mark.parametrize("options", NO_RESIDUAL)
def test_a_residual_is_of_an_undiscounted_mean_of_others(tmp_path: Path, options: str) -> None:
    assert problem(tmp_path, RESIDUAL, *options.split()).endswith(NO_RESIDUAL[options])


def test_a_critic_of_residuals_goes_with_these(tmp_path: Path) -> None:
    for options in (
        "critic.head.start=mean_reward critic.head.mean_reward=0",
        "critic.head.kind=bounded critic.head.low=-2 critic.head.high=2",
        "algorithm.baseline.kind=trusted",
        "components.decoupled_gae.lambda_critic=0.9",
        "critic.kind=probe critic.init=policy critic.ridge.penalty=0.1",
    ):
        fit_config(tmp_path, RESIDUAL, *options.split())


ADAPTERS = ("critic.kind=adapters", "critic.lora.rank=4", "actor.lora.rank=2")
BESIDE_A_BASE = {
    "critic.layers=2": "set critic.layers=null, or critic.kind=network",
    "critic.head_function=mine:head": "set critic.head_function=null, or critic.kind=network",
    "critic.attn_implementation=eager": (
        "set critic.attn_implementation=auto, or critic.kind=network"
    ),
    "critic.dtype=bfloat16": "set critic.dtype=float32, or critic.kind=network",
    "critic.frozen=[self_attn.]": "or set critic.lora=null",
    "critic.gradient_checkpointing=true": "read the same layers: give both the same value",
    "actor.gradient_checkpointing=true": "read the same layers: give both the same value",
    "critic.init=reward_model": "set critic.init=policy, or to the folder of saved ones",
    "actor.lora=null": "set actor.lora={}, or critic.kind=network",
    "critic.lora=null": "or critic.kind=probe, which trains a head alone",
}


@pytest.mark.parametrize("option", BESIDE_A_BASE)
def test_adapters_are_on_the_actors_frozen_base(tmp_path: Path, option: str) -> None:
    assert problem(tmp_path, *ADAPTERS, option).endswith(BESIDE_A_BASE[option])


def test_adapters_go_with_what_a_network_does(tmp_path: Path) -> None:
    both = ("actor.gradient_checkpointing=true", "critic.gradient_checkpointing=true")
    privileged = ("critic.prompt.kind=privileged", "critic.prompt.template='{answer}{prompt}'")
    fit_config(tmp_path, *ADAPTERS, *both, *privileged, "critic.count=2", "actor.dtype=bfloat16")
    fit_config(tmp_path, *ADAPTERS, "actor.lora=null", "critic.kind=network")


def test_each_rule_is_there_once() -> None:
    """One function, and one name, for one thing that is refused."""
    names = [rule.__name__ for rule in RULES[FitConfig]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("system", mostly_slow(CRITIC_FREE))
def test_a_base_may_say_how_a_critic_starts_and_how_large_it_is(system: str) -> None:
    base = (
        "critic.init=policy",
        "critic.optimizer.lr=1e-5",
        "critic.gradient_checkpointing=true",
        "critic.dtype=bfloat16",
    )
    assert list(critic_options_have_a_critic(system_config(system, *base))) == []


def test_a_critic_free_preset_over_another_is_refused() -> None:
    """It would leave the preset's critic without effect, so it must not pass for it."""
    files = [CONF / "vapo.yaml", CONF / "algorithm/sao.yaml", CONF / "algorithm/grpo.yaml"]
    with pytest.raises(Exception, match=r"critic\.frozen has no effect"):
        load_config(FitConfig, files, [])


CONFLICTS = {  # of the methods' sheet: options that exclude each other, and a mend
    "one band": (
        ("algorithm.surrogate=dis", "algorithm.mismatch.tis_cap=2", NO_CLIP),
        "tis_cap=null",
    ),
    "no clip": (
        ("algorithm.surrogate=dppo_tv", "algorithm.dual_clip=3", NO_CLIP),
        "dual_clip=null",
    ),
    "clip-higher": (("algorithm.surrogate=dis",), "components.clip_higher.enabled=false"),
    "a group of one, linear_mix": (
        ("algorithm.baseline.kind=linear_mix", SINGLE),
        "group_size to 2",
    ),
    "a group of one, tether": (("algorithm.baseline.kind=tether", SINGLE), "group_size to 2"),
    "a group of one, noise": (("critic.weights=prompt_noise", SINGLE), "group_size to 2"),
    "a group of one, dropped groups": (
        ("algorithm.dynamic_sampling_attempts=2", SINGLE),
        "group_size to 2",
    ),
    "a range": (("critic.head.kind=bounded", "critic.head.low=0"), "lower critic.head.low"),
    "a value clip": (
        ("critic.value_clip=0.2", CATEGORICAL, "critic.loss=cross_entropy"),
        "critic.value_clip=null",
    ),
    "noise of a cross-entropy": (
        ("critic.weights=prompt_noise", CATEGORICAL, "critic.loss=cross_entropy"),
        "critic.weights=none",
    ),
    "a bias at the end": (
        (
            *("critic.head.kind=bounded", "critic.head.start=mean_reward"),
            "critic.head.mean_reward=1",
        ),
        "critic.head.mean_reward 1 must be between",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts_are_refused_with_a_mend(tmp_path: Path, name: str) -> None:
    options, mend = CONFLICTS[name]
    assert mend in problem(tmp_path, *options)


def test_the_mask_of_the_entropy_bonus_needs_critics_and_a_bonus(tmp_path: Path) -> None:
    share, several = "algorithm.disagreement_mask_share=0.2", "critic.count=2"
    bonus = "algorithm.entropy_coef=0.01"
    assert "set critic.count to 2 or more" in problem(tmp_path, share, bonus)
    assert "set algorithm.entropy_coef above 0" in problem(tmp_path, share, several)
    fit_config(tmp_path, share, several, bonus)


def test_epochs_and_a_minibatch_size_may_be_combined(tmp_path: Path) -> None:
    fit_config(tmp_path, "critic.epochs=2", "critic.minibatch_size=256")
