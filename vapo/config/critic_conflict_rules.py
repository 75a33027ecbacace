"""Which options of critic and algorithm exclude each other, and which need a critic or groups.

What a head and its loss need is in `critic_rules`.
"""

from __future__ import annotations

from typing import Any

from vapo.config.algorithm import AlgorithmConfig, DisSurrogate, DppoSurrogate, Evpo
from vapo.config.hyperparameters import resolve
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig

GROUP_KEYS = (
    "components.group_sampling.group_size",
    "components.group_sampling.enabled",
)
WITH_GROUPS = (
    "set components.group_sampling.group_size to 2 or more and "
    "components.group_sampling.enabled to true"
)
# What a config of any system may say: where a critic starts, and how large and fast it is.
NOT_A_METHOD = {
    *("init", "reward_model_path", "optimizer", "dtype", "gradient_checkpointing"),
    *("attn_implementation", "pretraining_lr", "head_function"),
}


def critic_options_have_a_critic(config: FitConfig) -> Problem | None:
    """What makes a method of the critic would be ignored without one."""
    algorithm = config.algorithm
    if algorithm.has_critic:
        return None
    plain, own = FitConfig(), config.critic
    keys = {
        f"critic.{name}": (getattr(own, name), getattr(plain.critic, name))
        for name in vars(plain.critic)
        if name not in NOT_A_METHOD | {"head", "prompt"}
    }
    keys["critic.head.kind"] = (own.head.kind, plain.critic.head.kind)
    keys["critic.head.start"] = (own.head.start, plain.critic.head.start)
    keys["critic.prompt.kind"] = (own.prompt.kind, plain.critic.prompt.kind)
    share = "agreement_mask_share"
    keys[f"algorithm.{share}"] = (getattr(algorithm, share), getattr(plain.algorithm, share))
    for key, (value, default) in keys.items():
        if value != default:
            return Problem(
                (key, "algorithm.advantage_estimator"),
                f"{key} has no effect: algorithm.advantage_estimator "
                f"{algorithm.advantage_estimator} has no critic; set {key}={_written(default)}",
            )
    return None


def baseline_has_values(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    kind, estimator = algorithm.baseline.kind, algorithm.advantage_estimator
    if kind == "critic" or estimator == "gae":
        return None
    return Problem(
        ("algorithm.baseline.kind", "algorithm.advantage_estimator"),
        f"algorithm.baseline.kind {kind} weighs the critic's advantages of "
        f"algorithm.advantage_estimator gae, and the estimator is {estimator}, which has a "
        "baseline of its own: set algorithm.baseline.kind=critic, or "
        "algorithm.advantage_estimator=gae",
    )


def baseline_has_groups(config: FitConfig) -> Problem | None:
    baseline = config.algorithm.baseline
    alone = isinstance(baseline, Evpo) and baseline.fallback == "batch_mean"
    if baseline.kind == "critic" or alone or resolve(config).group_size > 1:
        return None
    keys: tuple[str, ...] = ("algorithm.baseline.kind",)
    named = f"algorithm.baseline.kind {baseline.kind}"
    other = "algorithm.baseline.kind=critic"
    if isinstance(baseline, Evpo):
        keys = (*keys, "algorithm.baseline.fallback")
        named += f" with algorithm.baseline.fallback {baseline.fallback}"
        other = "algorithm.baseline.fallback=batch_mean"
    return Problem(
        (*keys, *GROUP_KEYS),
        f"{named} takes the mean reward of the other responses to a prompt, and there is one "
        f"response per prompt: {WITH_GROUPS}, or set {other}",
    )


def noise_weights_have_groups(config: FitConfig) -> Problem | None:
    weights = config.critic.weights
    if weights == "none" or resolve(config).group_size > 1:
        return None
    return Problem(
        ("critic.weights", *GROUP_KEYS),
        f"critic.weights {weights} is made of the spread of the rewards of a prompt's responses, "
        f"and there is one response per prompt: {WITH_GROUPS}, or set critic.weights=none",
    )


def noise_weights_have_squared_errors(config: FitConfig) -> Problem | None:
    critic = config.critic
    if critic.weights == "none" or critic.loss == "squared_error":
        return None
    return Problem(
        ("critic.weights", "critic.loss"),
        f"critic.weights {critic.weights} is the weight of a squared error by its noise, which "
        f"says nothing of critic.loss {critic.loss}; nobody has tested the two together: set "
        "critic.weights=none, or critic.loss=squared_error",
    )


def own_ratio_is_alone(config: FitConfig) -> Problem | None:
    """DIS and DPPO divide by the rollout policy and have a band of their own."""
    algorithm = config.algorithm
    if not isinstance(algorithm, (DisSurrogate, DppoSurrogate)):
        return None
    assert isinstance(algorithm, AlgorithmConfig)
    if (cap := algorithm.mismatch.tis_cap) is not None:
        key = "algorithm.mismatch.tis_cap"
        return Problem(
            ("algorithm.surrogate", key),
            f"{key} {cap:g} corrects for the policy that sampled, and algorithm.surrogate "
            f"{algorithm.surrogate} divides by that policy already, so it would be corrected "
            f"twice: set {key}=null, or algorithm.surrogate=clipped_ratio",
        )
    clips = {
        "components.clip_higher.enabled": (resolve(config).eps_high != algorithm.eps_low, "false"),
        "algorithm.dual_clip": (algorithm.dual_clip is not None, "null"),
    }
    for key, (is_set, off) in clips.items():
        if is_set:
            return Problem(
                ("algorithm.surrogate", key),
                f"{key} has no effect: algorithm.surrogate {algorithm.surrogate} drops tokens "
                f"outside a band of its own in place of PPO's clip; set {key}={off}, or "
                "algorithm.surrogate=clipped_ratio",
            )
    return None


def _written(default: Any) -> str:
    return "null" if default is None else str(default).lower()


CRITIC_CONFLICT_RULES: tuple[Rule, ...] = (
    critic_options_have_a_critic,
    baseline_has_values,
    baseline_has_groups,
    noise_weights_have_groups,
    noise_weights_have_squared_errors,
    own_ratio_is_alone,
)
