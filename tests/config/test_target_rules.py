"""Rules on the critic's targets, weights and truncation, the baseline, lambda and DIS or DPPO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.config.test_components import OWNED, STATES, with_switches
from tests.systems import system_config
from vapo.config import resolve
from vapo.config.algorithm_rules import surrogate_has_one_ratio
from vapo.config.hyperparameters import compares_groups
from vapo.diagnostics.reward_weight import reward_weight_notes
from vapo.errors import UserError

SINGLE = "components.group_sampling.group_size=1"
LINEAR_MIX = "algorithm.baseline.kind=linear_mix"
EVPO = "algorithm.baseline.kind=evpo"
NOISE = "critic.weights=prompt_noise"
BOOTSTRAP = "critic.bootstrap_truncated=true"
PUNISHED = "rewards.overlong.soft_punishment=true"
FILTERED = "rewards.overlong.filter_truncated=true"
DIS = ("algorithm.surrogate=dis", "components.clip_higher.enabled=false")
DPPO = ("algorithm.surrogate=dppo_tv", "components.clip_higher.enabled=false")
GSPO = (
    "algorithm.surrogate=gspo",
    "components.clip_higher.enabled=false",
    "components.token_level_loss.enabled=false",
)
CISPO = ("algorithm.surrogate=cispo", "components.clip_higher.enabled=false")
K = "components.length_adaptive_gae.k=0.5"
CRITIC_FREE = (
    "algorithm.advantage_estimator=leave_one_out",
    "components.value_pretraining.enabled=false",
    "components.decoupled_gae.enabled=false",
)
NO_CRITIC = (*CRITIC_FREE, "components.length_adaptive_gae.enabled=false")
OWN = (
    "algorithm.advantage_estimator=function",
    "algorithm.estimator_function=tests.advantages.test_own_estimator:x",
    "algorithm.estimator_uses_critic=true",
)

REFUSED = [
    ((NOISE, SINGLE), "there is one response per prompt"),
    (
        (NOISE, "rewards.verifier=reward_model", "rewards.reward_model_path=x"),
        "may return any",
    ),
    ((NOISE, "rewards.verifier=python", "rewards.function=a:b"), "may return any"),
    (
        (
            "algorithm.surrogate=dis",
            "components.clip_higher.enabled=false",
            "rollouts.top_p=0.9",
        ),
        "set rollouts.top_p=1",
    ),
    ((NOISE, "critic.loss=cross_entropy", "critic.head.kind=categorical"), "squared error"),
    (("critic.anchors=[0.6,0.3]",), "must ascend and lie in (0, 1]"),
    (("critic.anchors=[0.3,0.3]",), "must ascend"),
    (("critic.anchors=[0,0.3]",), "(0, 1]"),
    (("critic.anchors=[0.3,1.1]",), "(0, 1]"),
    (("critic.late_anchor=0.95",), "set critic.anchors, or critic.late_anchor=null"),
    (("critic.late_anchor_tokens=9",), "no effect without critic.late_anchor"),
    ((BOOTSTRAP, "rewards.overlong.soft_punishment=true"), "is part of that reward"),
    ((BOOTSTRAP, EVPO), "compares it with other responses' rewards"),
    ((BOOTSTRAP, NOISE), "measures how it scatters"),
    (("critic.truncated=leave_out", *NO_CRITIC), "critic.truncated has no effect"),
    ((BOOTSTRAP, *NO_CRITIC), "critic.bootstrap_truncated has no effect"),
    ((BOOTSTRAP, *OWN), "makes its own: leave it at false"),
    (("critic.anchors=[0.5]", *NO_CRITIC), "critic.anchors has no effect"),
    (("critic.reward=unshaped", *OWN), "makes its own: leave it at shaped"),
    (("critic.reward=unshaped",), "set rewards.overlong.soft_punishment=true, or critic.reward=sh"),
    (("critic.reward=unshaped", FILTERED), "so there is no punishment to leave out"),
    (
        ("critic.truncated=train",),
        "set rewards.overlong.filter_truncated=true, or critic.truncated=as_policy",
    ),
    (("critic.truncated=train", PUNISHED), "the policy trains on truncated responses here"),
    ((LINEAR_MIX, *NO_CRITIC), "weighs the advantages of GAE"),
    ((LINEAR_MIX, SINGLE), "mean reward of a prompt's responses as a baseline"),
    (("algorithm.baseline.kind=tether", SINGLE), "group_size to 2 or more"),
    ((EVPO, "algorithm.baseline.fallback=group_mean", SINGLE), "fallback=batch_mean"),
    ((EVPO, "algorithm.gamma=0.99"), "not discounted: set algorithm.gamma=1"),
    ((K, "components.length_adaptive_gae.enabled=false"), "while the component is off"),
    ((K, *CRITIC_FREE), "components.length_adaptive_gae.enabled=false"),
    ((DIS[0],), "sets PPO's clip, which is not used then: set components.clip_higher"),
    ((*DPPO, "algorithm.dual_clip=3"), "algorithm.dual_clip=null"),
    ((*DIS, "algorithm.mismatch.tis_cap=2"), "a second time: set algorithm.mismatch.tis_cap=null"),
    ((*DPPO, "algorithm.mismatch.mask_above=2"), "algorithm.mismatch.mask_above=null"),
    (
        (*DIS, *NO_CRITIC, "algorithm.advantage_estimator=correct_only"),
        "has no policy gradient to correct",
    ),
    (GSPO[:2], "is a mean over responses: set components.token_level_loss.enabled=false"),
    (
        (GSPO[0], GSPO[2]),
        "is not used then: set components.clip_higher.enabled=false",
    ),
    (
        (*GSPO, "algorithm.sequence_reduction=sum"),
        "over responses: set algorithm.sequence_reduction=mean",
    ),
    ((*GSPO, "algorithm.sequence_reduction=constant_length"), "sequence_reduction=mean"),
    ((*GSPO, "algorithm.dual_clip=3"), "algorithm.dual_clip=null"),
    (
        (*GSPO, *NO_CRITIC, "algorithm.advantage_estimator=correct_only"),
        "has no policy gradient to correct",
    ),
    ((CISPO[0],), "sets PPO's clip, which is not used then: set components.clip_higher"),
    ((*CISPO, "algorithm.dual_clip=3"), "algorithm.dual_clip=null"),
    ((*CISPO, "algorithm.gspo_eps_low=1e-3"), "unknown key 'algorithm.gspo_eps_low'"),
    ((*GSPO, "algorithm.gspo_eps_high=0"), "must be"),
    ((*CISPO, "algorithm.cispo_eps_high=0"), "must be"),
]


@pytest.mark.parametrize(("overrides", "reason"), REFUSED, ids=lambda x: str(x)[:60])
def test_refused_with_its_reason(tmp_path: Path, overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        fit_config(tmp_path, *overrides)
    assert reason in " ".join(str(caught.value).split())


def test_one_error_names_all_that_dis_excludes(tmp_path: Path) -> None:
    every = ("algorithm.surrogate=dis", "algorithm.dual_clip=3", "algorithm.mismatch.tis_cap=2")
    with pytest.raises(UserError) as caught:
        fit_config(tmp_path, *every)
    mend = "components.clip_higher.enabled=false, algorithm.dual_clip=null, algorithm.mismatch."
    assert f"{mend}tis_cap=null" in " ".join(str(caught.value).split())


@pytest.mark.parametrize(
    "overrides",
    [
        (EVPO, SINGLE),
        DIS,
        GSPO,
        CISPO,
        (*GSPO, "algorithm.mismatch.icepop=true", "training.minibatch_size=null"),
        (*GSPO, "algorithm.mismatch.tis_cap=2", "rollouts.top_p=0.9"),
        (*CISPO, "components.token_level_loss.enabled=false", "algorithm.cispo_eps_low=0.9"),
        (*DPPO, "training.max_staleness=1"),
        (*DPPO, "components.token_level_loss.enabled=false", "algorithm.sequence_reduction=sum"),
        (BOOTSTRAP, "critic.truncated=leave_out"),
        ("critic.anchors=[0.3,0.6,1.0]", "critic.late_anchor=0.95"),
        (NOISE, LINEAR_MIX, PUNISHED, "critic.reward=unshaped", K),
        (FILTERED, "critic.truncated=train"),
    ],
)
def test_allowed(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    fit_config(tmp_path, *overrides)


def test_what_must_keep_groups_whole(tmp_path: Path) -> None:
    assert not compares_groups(fit_config(tmp_path))
    assert not compares_groups(fit_config(tmp_path, EVPO))
    group_mean = (EVPO, "algorithm.baseline.fallback=group_mean")
    for overrides in ((NOISE,), (LINEAR_MIX,), group_mean, NO_CRITIC):
        assert compares_groups(fit_config(tmp_path, *overrides))


def test_k_takes_the_place_of_alpha(tmp_path: Path) -> None:
    numbers = resolve(fit_config(tmp_path, K))
    assert (numbers.alpha, numbers.k) == (None, 0.5)


def test_the_first_tokens_weight_is_said_at_the_start() -> None:
    """exp(-1/2), k, and 0.95^31 of a budget of 32; the warning where hardly any gets there."""
    off = "components.value_pretraining.enabled=false"
    constant = "components.length_adaptive_gae.enabled=false"
    shown = {
        (): "alpha 2: the advantage of a long response's first token has 60.7 % of",
        (K,): "k 0.5: the advantage of a long response's first token has 50 % of",
        (constant,): "lambda_policy 0.95, 32 tokens: the advantage of a long response's first "
        "token has 20.4 %",
        (off,): "60.7 %",
    }
    for overrides, text in shown.items():
        (line,) = reward_weight_notes(system_config("vapo", *overrides))
        assert text in line
    paper = "components.length_adaptive_gae.alpha=0.05"
    assert len(reward_weight_notes(system_config("vapo", paper))) == 1
    line, warning = reward_weight_notes(system_config("vapo", paper, off))
    assert "2.06e-07 %" in line
    assert warning.startswith("warning: without components.value_pretraining")
    assert reward_weight_notes(system_config("grpo")) == []


@pytest.mark.parametrize(
    ("overrides", "is_guard"),
    [
        ((), True),
        (("algorithm.lambda_policy=0.95",), False),
        (("components.length_adaptive_gae.enabled=true",), False),
        ((K, "components.length_adaptive_gae.enabled=true"), False),
        (("algorithm.lambda_policy=0.95", "algorithm.baseline={kind: critic}"), True),
    ],
)
def test_tether_below_lambda_1_is_no_guard(overrides: tuple[str, ...], is_guard: bool) -> None:
    lines = reward_weight_notes(system_config("tether", *overrides))
    warned = [line for line in lines if "tether takes the critic's values out" in line]
    assert len(warned) == (not is_guard)
    for line in warned:
        assert "algorithm.lambda_policy=1, or algorithm.baseline.kind=trusted" in line


@pytest.mark.parametrize(
    ("surrogate", "excluded"),
    [
        ("gspo", {"clip_higher", "token_level_loss"}),
        ("cispo", {"clip_higher"}),
        ("dis", {"clip_higher"}),
    ],
)
def test_a_surrogate_excludes_its_switches_alone_in_all_128_states(
    tmp_path: Path, surrogate: str, excluded: set[str]
) -> None:
    off = ("components.clip_higher.enabled=false", "components.token_level_loss.enabled=false")
    config = fit_config(tmp_path, f"algorithm.surrogate={surrogate}", *off)
    switches = {f"components.{name}.enabled" for name in OWNED}
    for state in STATES:
        switched = with_switches(state, config)
        numbers = resolve(switched)
        assert (numbers.loss_reduction == "token_mean") == state[
            list(OWNED).index("token_level_loss")
        ]
        problems = list(surrogate_has_one_ratio(switched))
        named = {key for problem in problems for key in problem.keys if key in switches}
        is_on = {name for name, on in zip(OWNED, state, strict=True) if on}
        assert {key.split(".")[1] for key in named} == excluded & is_on
        assert len(problems) == bool(named), "one error names all of them"
