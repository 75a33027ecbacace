"""Rules between the critic's options: each is refused with its reason, and its mend is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.config.test_validation import CRITIC_FREE as NO_CRITIC
from tests.config.test_validation import problem
from tests.systems import CONF, CRITIC_FREE, system_config
from vapo.config import FitConfig
from vapo.config.critic import CriticConfig
from vapo.config.critic_conflict_rules import NOT_A_METHOD, critic_options_have_a_critic
from vapo.config.loading import load_config

SINGLE = "components.group_sampling.enabled=false"
CATEGORICAL = "critic.head.kind=categorical"
OPTIONS = {  # one value of each option that a critic-free system would ignore, and the mend
    "critic.frozen=[self_attn.]": "critic.frozen=[]",
    "critic.lora.rank=4": "critic.lora=null",
    "critic.head.kind=bounded": "critic.head.kind=scalar",
    "critic.head.start=first_batch": "critic.head.start=as_loaded",
    "critic.loss=cross_entropy": "critic.loss=squared_error",
    "critic.weights=prompt_noise": "critic.weights=none",
    "critic.anchors=[0.5]": "critic.anchors=[]",
    "critic.late_anchor=0.95": "critic.late_anchor=null",
    "critic.late_anchor_tokens=9": "critic.late_anchor_tokens=6144",
    "critic.reward=unshaped": "critic.reward=shaped",
    "critic.truncated=train": "critic.truncated=as_policy",
    "critic.bootstrap_truncated=true": "critic.bootstrap_truncated=false",
    "critic.epochs=2": "critic.epochs=1",
    "critic.minibatch_size=64": "critic.minibatch_size=null",
    "critic.prompt.kind=privileged critic.prompt.template='{answer}{prompt}'": (
        "critic.prompt.kind=policy"
    ),
    "critic.count=2": "critic.count=1",
    "algorithm.agreement_mask_share=0.1": "algorithm.agreement_mask_share=0.0",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_critics_option_needs_a_critic(tmp_path: Path, option: str) -> None:
    chosen = ("algorithm.advantage_estimator=leave_one_out", *NO_CRITIC)
    message = problem(tmp_path, *chosen, *option.split())
    assert "has no effect: algorithm.advantage_estimator leave_one_out has no critic" in message
    mend = OPTIONS[option]
    assert message.endswith(f"set {mend}")
    fit_config(tmp_path, *chosen, mend)


def test_every_option_of_the_critic_is_refused_or_named_as_harmless() -> None:
    """A new key of the block is refused without a critic from its first day."""
    refused = {option.split("=")[0].split(".")[1] for option in OPTIONS if "critic." in option}
    assert refused | NOT_A_METHOD == set(vars(CriticConfig()))
    assert not refused & NOT_A_METHOD


@pytest.mark.parametrize("system", CRITIC_FREE)
def test_a_base_may_say_how_a_critic_starts_and_how_large_it_is(system: str) -> None:
    base = (
        "critic.init=policy",
        "critic.optimizer.lr=1e-5",
        "critic.gradient_checkpointing=true",
        "critic.dtype=bfloat16",
    )
    assert critic_options_have_a_critic(system_config(system, *base)) is None


def test_a_critic_free_overlay_over_a_preset_is_refused() -> None:
    """It would leave the preset's critic without effect, so it must not pass for it."""
    files = [CONF / "vapo.yaml", CONF / "algorithm/sao.yaml", CONF / "algorithm/grpo.yaml"]
    with pytest.raises(Exception, match=r"critic\.frozen has no effect"):
        load_config(FitConfig, files, [])


@pytest.mark.parametrize(
    ("kind", "mend"),
    [
        ("linear_mix", "algorithm.baseline.kind=critic"),
        ("tether", "algorithm.baseline.kind=critic"),
        (
            "evpo algorithm.baseline.fallback=group_mean",
            "algorithm.baseline.fallback=batch_mean",
        ),
    ],
)
def test_a_baseline_of_groups_needs_groups(tmp_path: Path, kind: str, mend: str) -> None:
    chosen = f"algorithm.baseline.kind={kind}".split()
    for single in (SINGLE, "components.group_sampling.group_size=1"):
        message = problem(tmp_path, *chosen, single)
        assert "there is one response per prompt" in message
        assert "components.group_sampling.group_size to 2 or more" in message
        assert message.endswith(f"set {mend}")
        fit_config(tmp_path, *chosen, single, mend)
    fit_config(tmp_path, *chosen)
    fit_config(tmp_path, "algorithm.baseline.kind=evpo", SINGLE)


def test_a_baseline_needs_gae(tmp_path: Path) -> None:
    chosen = ("algorithm.advantage_estimator=leave_one_out", *NO_CRITIC)
    message = problem(tmp_path, *chosen, "algorithm.baseline.kind=tether")
    assert "a baseline of its own: set algorithm.baseline.kind=critic" in message
    own = (
        "algorithm.advantage_estimator=function",
        "algorithm.estimator_function=tests.fuzz:nothing",
        "algorithm.estimator_uses_critic=true",
    )
    assert "the estimator is function" in problem(
        tmp_path, *own, "algorithm.baseline.kind=linear_mix"
    )


def test_noise_weights_need_groups(tmp_path: Path) -> None:
    message = problem(tmp_path, "critic.weights=prompt_noise", SINGLE)
    assert "the spread of the rewards of a prompt's responses" in message
    assert message.endswith("set critic.weights=none")
    fit_config(tmp_path, "critic.weights=prompt_noise")


def test_noise_weights_need_squared_errors(tmp_path: Path) -> None:
    chosen = ("critic.weights=prompt_noise", CATEGORICAL)
    message = problem(tmp_path, *chosen, "critic.loss=cross_entropy")
    assert "nobody has tested the two together" in message
    assert message.endswith("set critic.weights=none, or critic.loss=squared_error")
    fit_config(tmp_path, CATEGORICAL, "critic.loss=cross_entropy")


@pytest.mark.parametrize("surrogate", ["dis", "dppo_tv"])
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("algorithm.mismatch.tis_cap=2", "it would be corrected twice: set"),
        ("components.clip_higher.enabled=true", "a band of its own in place of PPO's clip"),
        ("algorithm.dual_clip=3", "a band of its own in place of PPO's clip"),
    ],
)
def test_a_ratio_to_the_rollout_policy_is_alone(
    tmp_path: Path, surrogate: str, other: str, reason: str
) -> None:
    alone = (f"algorithm.surrogate={surrogate}", "components.clip_higher.enabled=false")
    message = problem(tmp_path, *alone, other)
    assert reason in message
    assert message.endswith("or algorithm.surrogate=clipped_ratio")
    fit_config(tmp_path, *alone)
    fit_config(tmp_path, other)


def test_epochs_and_a_minibatch_size_may_be_combined(tmp_path: Path) -> None:
    fit_config(tmp_path, "critic.epochs=2", "critic.minibatch_size=256")
