"""What the presets of `conf/algorithm` resolve to, and the rules between their keys."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

from tests.config.fits import STATE_TRACKING, fit_config
from tests.config.test_validation import CRITIC_FREE as NO_CRITIC
from tests.config.test_validation import problem
from tests.systems import CONF, CRITIC_FREE, PRESETS, SYSTEMS, WITH_CRITIC, system_config
from vapo.advantages.estimators import ESTIMATORS
from vapo.config import Components, FitConfig, resolve
from vapo.config.algorithm import COMPARES_GROUPS, AlgorithmConfig
from vapo.config.hyperparameters import Hyperparameters
from vapo.config.loading import load_config
from vapo.config.sources import default_name
from vapo.config.written import flatten

SWITCHES = [f"components.{name}.enabled" for name in get_type_hints(Components)]
SIZES = ("training.", "components.group_sampling.num_prompts", "components.group_sampling.group")
LEFT_TO_THE_TASK = (*SIZES, "data.", "rollouts.", "evaluation.", "trainer.", "seed", "output_dir")


@cache
def default(*overrides: str) -> FitConfig:
    return load_config(FitConfig, STATE_TRACKING, list(overrides))


def values(config: FitConfig) -> dict[str, Any]:
    """Every resolved value; the run's name and tags are the system's own."""
    return {k: v for k, v in flatten(config).items() if not k.startswith("tracking.")}


def test_there_is_a_preset_for_every_system() -> None:
    assert {path.stem for path in CONF.glob("algorithm/*.yaml")} == set(SYSTEMS)


def test_all_on_is_the_vapo_preset() -> None:
    all_on = default(*(f"{switch}=true" for switch in SWITCHES))
    assert values(system_config("vapo")) == values(all_on)
    assert resolve(system_config("vapo")) == resolve(all_on)


def test_all_off_is_the_ppo_preset() -> None:
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
        "critic.value_clip=0.5",
        "components.clip_higher.eps_high=0.5",
        "components.positive_example_lm_loss.mu=0.7",
        "components.decoupled_gae.lambda_critic=0.5",
    ]
    changed = default(*base)
    for system in ("vapo", "ppo"):
        over = load_config(FitConfig, [*STATE_TRACKING, CONF / f"algorithm/{system}.yaml"], [])
        numbers = resolve(over)
        assert numbers.gamma == 1.0
        assert numbers.eps_low == 0.2
        assert numbers.eps_high == (0.28 if system == "vapo" else 0.2)
        assert numbers.mu == (0.1 if system == "vapo" else 0.0)
        assert numbers.lambda_critic == (1.0 if system == "vapo" else None)
        assert numbers.lambda_policy == 0.95
    assert resolve(changed).eps_low == 0.1


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_preset_leaves_sizes_to_the_task(system: str) -> None:
    base, over = values(default()), values(system_config(system))
    changed = {
        key for key in base if base[key] != over.get(key) and key.startswith(LEFT_TO_THE_TASK)
    }
    one_step = {"rloo", "remax", "easyppo"}
    assert changed == ({"training.minibatch_size"} if system in one_step else set())
    rates = {"actor.optimizer.lr", "critic.optimizer.lr", "components.value_pretraining.lr"}
    assert not rates & {key for key in base if base[key] != over.get(key)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_carries_its_systems_name(system: str) -> None:
    config = system_config(system)
    assert default_name(config).endswith(f"{system} seed{config.seed}")
    assert config.tracking.tags == {"system": system}


@pytest.mark.parametrize("system", SYSTEMS)
def test_critic(system: str) -> None:
    config = system_config(system)
    assert config.algorithm.has_critic == (system not in CRITIC_FREE)
    if system in CRITIC_FREE:
        numbers = resolve(config)
        assert (numbers.value_pretraining_iterations, numbers.lambda_critic) == (0, None)
        assert (numbers.alpha is not None) == (system == "milestones"), "whose values are no critic"


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
    "vineppo": ("vine", "clipped_ratio", "token_mean", 0.2, True, "k3 loss"),
    "poise": ("poise", "clipped_ratio", "token_mean", 0.28, False, None),
    "milestones": ("milestones", "clipped_ratio", "token_mean", 0.28, True, None),
    "otb": ("otb", "clipped_ratio", "token_mean", 0.28, True, None),
    "oppo": ("oppo", "clipped_ratio", "token_mean", 0.28, True, None),
    "gspo": ("group_relative", "gspo", "sequence_mean", 0.2, False, None),
    "cispo": ("group_relative", "cispo", "token_mean", 0.2, False, None),
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
    assert numbers.mu == (0.1 if system in ("milestones", "otb", "oppo") else 0.0)
    least = 0.0 if system == "poise" else -1.0
    assert (config.rewards.correct, config.rewards.incorrect) == (1.0, least)


PRESET_NUMBERS = {  # reduction, eps_high, lambda_policy or alpha or k, group size, rewards' least
    "sao": ("token_mean", 0.2, "alpha 1.5", 1, -1.0),
    "hl_gauss": ("token_mean", 0.28, "alpha 2.0", 8, -1.0),
    "bpco": ("sequence_sum", 0.2, "alpha 0.4", 1, 0.0),
    "bpco_answer": ("sequence_sum", 0.2, "alpha 0.4", 1, 0.0),
    "le_critique": ("token_mean", 0.2, "lambda 1.0", 8, 0.0),
    "tether": ("token_mean", 0.2, "lambda 1.0", 8, 0.0),
    "evpo": ("token_mean", 0.28, "alpha 2.0", 8, -1.0),
    "easyppo": ("token_mean", 0.28, "lambda 1.0", 8, -1.0),
    "justrl2": ("token_mean", 0.28, "k 0.5", 8, 0.0),
    "sp3o": ("sequence_mean", 0.2, "lambda 1.0", 8, -1.0),
    "probe": ("token_mean", 0.28, "alpha 2.0", 8, -1.0),
    "adapters": ("token_mean", 0.28, "alpha 2.0", 8, -1.0),
    "trusted": ("token_mean", 0.28, "alpha 2.0", 8, -1.0),
    "residual": ("token_mean", 0.28, "alpha 2.0", 8, -1.0),
}


LIKE_VAPO = ("hl_gauss", "evpo", "probe", "adapters", "trusted", "residual")


def lambda_rule(numbers: Hyperparameters) -> str:
    for name in ("alpha", "k"):
        if getattr(numbers, name) is not None:
            return f"{name} {getattr(numbers, name)}"
    return f"lambda {numbers.lambda_policy}"


@pytest.mark.parametrize("preset", PRESETS)
def test_numbers_of_a_preset(preset: str) -> None:
    config = system_config(preset)
    numbers, rewards = resolve(config), config.rewards
    assert PRESET_NUMBERS[preset] == (
        numbers.loss_reduction,
        numbers.eps_high,
        lambda_rule(numbers),
        numbers.group_size,
        rewards.incorrect,
    )
    assert rewards.correct == 1.0
    assert numbers.value_pretraining_iterations > 0
    assert numbers.lambda_critic == 1.0
    assert numbers.num_prompts * numbers.group_size == 256
    assert numbers.mu == (0.1 if preset in LIKE_VAPO else 0.0)


METHOD = ("critic.", "algorithm.")
DIFFERENCES = {  # what sets a preset apart from plain PPO with a pretrained critic
    "sao": {
        "critic.frozen": '["self_attn."]',
        "critic.epochs": 2,
        "algorithm.surrogate": "dis",
        "algorithm.dis_eps_low": 0.3,
        "algorithm.dis_eps_high": 5.0,
    },
    "hl_gauss": {
        "critic.head.kind": "categorical",
        "critic.head.low": -1.1,
        "critic.head.high": 1.1,
        "critic.head.num_bins": 101,
        "critic.head.support": "midpoint",
        "critic.head.targets": "hl_gauss",
        "critic.head.sigma_ratio": 0.75,
        "critic.head.start": "first_batch",
        "critic.loss": "cross_entropy",
    },
    "bpco": {
        "critic.head.kind": "bounded",
        "critic.head.low": 0.0,
        "critic.head.high": 1.0,
        "critic.head.start": "first_batch",
        "algorithm.surrogate": "dppo_tv",
        "algorithm.dppo_delta": 0.2,
        "algorithm.sequence_reduction": "sum",
        "algorithm.whiten_advantages": False,
        "critic.value_clip": 0.5,
    },
    "le_critique": {
        "critic.head.kind": "categorical",
        "critic.head.low": 0.0,
        "critic.head.high": 1.0,
        "critic.head.num_bins": 2,
        "critic.head.support": "inclusive",
        "critic.head.targets": "two_hot",
        "critic.head.sigma_ratio": 0.75,
        "critic.head.start": "first_batch",
        "critic.loss": "cross_entropy",
        "critic.prompt.kind": "privileged",
        "critic.prompt.template": "{answer};{prompt}",
        "algorithm.baseline.kind": "linear_mix",
        "algorithm.baseline.weight": 0.5,
        "algorithm.baseline.group_baseline": "leave_one_out",
        "algorithm.lambda_policy": 1.0,
    },
    "evpo": {
        "algorithm.baseline.kind": "evpo",
        "algorithm.baseline.threshold": 0.0,
        "algorithm.baseline.fallback": "batch_mean",
        "algorithm.baseline.level": "token",
    },
    "easyppo": {
        "critic.weights": "prompt_noise",
        "critic.truncated": "train",
        "critic.num_minibatches": 4,
        "algorithm.dual_clip": 3.0,
        "algorithm.kl.coef": 0.001,
        "algorithm.lambda_policy": 1.0,
    },
    "justrl2": {
        "critic.head.start": "first_batch",
        "critic.reward": "unshaped",
        "algorithm.dynamic_sampling_attempts": 4,
        "critic.value_clip": 0.2,
    },
    "probe": {
        "critic.kind": "probe",
        "critic.probe.layers": "[-1]",
        "critic.probe.lr": 1e-2,
        "critic.sampled_logprobs.lr": 1e-2,
    },
    "adapters": {
        "critic.kind": "adapters",
        "critic.lora.rank": 16,
        "critic.lora.lora_alpha": 32.0,
        "critic.lora.target_modules": "all",
    },
    "trusted": {
        "algorithm.baseline.kind": "trusted",
        "algorithm.baseline.decay": 0.5,
    },
    "residual": {
        "critic.head.start": "mean_reward",
        "critic.head.mean_reward": 0.0,
        "critic.target": "residual",
    },
    "sp3o": {
        "critic.anchors": "[0.3, 0.6, 0.9]",
        "critic.late_anchor": 0.95,
        "algorithm.lambda_policy": 1.0,
        "critic.value_clip": 0.5,
    },
}
PROMPT = ("critic.prompt.kind", "critic.prompt.template")
DIFFERENCES["bpco_answer"] = DIFFERENCES["bpco"] | {
    key: DIFFERENCES["le_critique"][key] for key in PROMPT
}
DIFFERENCES["tether"] = {
    key: value
    for key, value in DIFFERENCES["le_critique"].items()
    if key not in PROMPT and not key.startswith("algorithm.baseline.")
} | {
    "algorithm.baseline.kind": "tether",
    "algorithm.baseline.ridge": 1e-6,
    "algorithm.baseline.decay": 0.9,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_what_sets_a_preset_apart(preset: str) -> None:
    plain, own = flatten(default()), flatten(system_config(preset))
    changed = {
        key: value
        for key, value in own.items()
        if key.startswith(METHOD) and plain.get(key) != value and key != "critic.init"
    }
    assert changed == DIFFERENCES[preset]


def written(system: str) -> dict[str, Any]:
    """The keys that a preset says, and their values."""
    tree = OmegaConf.load(CONF / "algorithm" / f"{system}.yaml")
    return flatten_mapping(OmegaConf.to_container(tree))


def flatten_mapping(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for n, t in tree.items() for k, v in flatten_mapping(t, f"{prefix}.{n}").items()}


ALL_KEYS = {key for system in WITH_CRITIC for key in written(system)}
OF_A_KIND: dict[str, Any] = {  # and the kind or switch without which nothing reads them
    **dict.fromkeys((".critic.head.low", ".critic.head.high"), (".critic.head.kind", "scalar")),
    ".critic.head.mean_reward": (".critic.head.start", "as_loaded", "first_batch"),
    **{
        f".critic.head.{name}": (".critic.head.kind", "scalar", "bounded")
        for name in ("num_bins", "support", "targets", "sigma_ratio")
    },
    **{
        f".algorithm.baseline.{name}": (".algorithm.baseline.kind", *other)
        for name, other in {
            "weight": ("critic", "tether", "evpo", "trusted"),
            "group_baseline": ("critic", "tether", "evpo", "trusted"),
            "ridge": ("critic", "linear_mix", "evpo", "trusted"),
            "decay": ("critic", "linear_mix", "evpo"),
            "threshold": ("critic", "linear_mix", "tether", "trusted"),
            "fallback": ("critic", "linear_mix", "tether", "trusted"),
            "level": ("critic", "linear_mix", "tether", "trusted"),
        }.items()
    },
    ".algorithm.dis_eps_low": (".algorithm.surrogate", "clipped_ratio", "dppo_tv"),
    ".algorithm.dis_eps_high": (".algorithm.surrogate", "clipped_ratio", "dppo_tv"),
    ".algorithm.dppo_delta": (".algorithm.surrogate", "clipped_ratio", "dis"),
    **{
        f".critic.probe.{name}": (".critic.kind", "network", "adapters")
        for name in ("layers", "hidden_size", "lr")
    },
    ".critic.prompt.template": (".critic.prompt.kind", "policy"),
    # a probe's states say little without them, and a base of any system may have them
    ".critic.sampled_logprobs.lr": (".critic.kind", "network", "adapters"),
    ".critic.layers": (".critic.kind", "network"),  # a base may cut one, which others refuse
    ".critic.late_anchor_tokens": (".critic.late_anchor", None),
    ".algorithm.kl.estimator": (".algorithm.kl.coef", 0.0),
    ".algorithm.kl.placement": (".algorithm.kl.coef", 0.0),
    ".algorithm.sequence_reduction": (".components.token_level_loss.enabled", True),
    ".algorithm.lambda_policy": (".components.length_adaptive_gae.enabled", True),
    ".components.length_adaptive_gae.alpha": (".components.length_adaptive_gae.enabled", False),
    ".components.length_adaptive_gae.k": (".components.length_adaptive_gae.enabled", False),
    ".components.clip_higher.eps_high": (".components.clip_higher.enabled", False),
    ".components.positive_example_lm_loss.mu": (
        *(".components.positive_example_lm_loss.enabled", False),
    ),
    ".components.decoupled_gae.lambda_critic": (".components.decoupled_gae.enabled", False),
}


@pytest.mark.parametrize("system", WITH_CRITIC)
def test_a_preset_says_every_key_by_which_systems_with_a_critic_differ(system: str) -> None:
    """So that it may come after any other. Only sizes of the task are left to what is under it."""
    own = written(system)
    left = {key for key in ALL_KEYS - set(own) if not key.startswith((".training.", ".tracking."))}
    leaves_alpha = system in ("vapo", *LIKE_VAPO) or own.get(K) is not None
    for key in left - ({".components.length_adaptive_gae.alpha"} if leaves_alpha else set()):
        decides, *values_without = OF_A_KIND[key]
        assert own[str(decides)] in values_without, key


K = ".components.length_adaptive_gae.k"


@pytest.mark.parametrize(("under", "system"), [("le_critique", "sao"), ("sao", "justrl2")])
def test_a_preset_over_another_is_the_preset(under: str, system: str) -> None:
    files = [*STATE_TRACKING, *(CONF / f"algorithm/{name}.yaml" for name in (under, system))]
    alone, over = values(system_config(system)), values(load_config(FitConfig, files, []))
    changed = {key for key in alone | over if alone.get(key) != over.get(key)}
    assert changed <= {"algorithm.lambda_policy", "components.length_adaptive_gae.alpha"}


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
    others = {"gspo", "cispo", "logprob", "dis", "dppo_tv"}
    assert set(get_args(hints["surrogate"])) == {"clipped_ratio", *others}, (
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


@pytest.mark.parametrize("estimator", ["reward_to_go", "greedy_baseline", "correct_only", "vine"])
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
    ("override", "fix"),
    [
        ("components.clip_higher.enabled=true", "components.clip_higher.enabled=false"),
        ("algorithm.dual_clip=3", "algorithm.dual_clip=null"),
    ],
)
def test_clip_options_need_a_ratio(tmp_path: Path, override: str, fix: str) -> None:
    chosen = (
        "algorithm.surrogate=logprob",
        "training.minibatch_size=null",
        "components.clip_higher.enabled=false",
    )
    message = problem(tmp_path, *chosen, override)
    assert "no ratio to clip" in message
    assert message.endswith(f"set {fix}")
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
