"""Rules on the critic's targets, weights and truncation, the baseline, and the policy's lambda."""

from __future__ import annotations

from vapo.config.algorithm import Evpo, LinearMix, Tether
from vapo.config.critic import CriticConfig
from vapo.config.critic_rules import gives_configured_rewards
from vapo.config.hyperparameters import resolve
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig

_BASELINE = "algorithm.baseline.kind"
_ESTIMATOR = "algorithm.advantage_estimator"
_GROUP_KEYS = ("components.group_sampling.group_size", "components.group_sampling.enabled")
_ADAPTIVE = "components.length_adaptive_gae"
_OF_THE_TARGETS = ("reward", "bootstrap_truncated")


def own_estimator_makes_its_targets(config: FitConfig) -> Problem | None:
    """A user's estimator returns the value targets, so nothing else decides what is in them."""
    if config.algorithm.advantage_estimator == "gae":
        return None
    plain = CriticConfig()
    for name in _OF_THE_TARGETS:
        if getattr(config.critic, name) != getattr(plain, name):
            return Problem(
                (f"critic.{name}", _ESTIMATOR),
                f"critic.{name} is of the value targets that {_ESTIMATOR} gae makes, and "
                f"{config.algorithm.advantage_estimator} makes its own: leave it at "
                f"{_written(getattr(plain, name))}",
            )
    return None


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def noise_weights_have_groups(config: FitConfig) -> Problem | None:
    if config.critic.weights != "prompt_noise" or resolve(config).group_size > 1:
        return None
    return Problem(
        ("critic.weights", *_GROUP_KEYS),
        "critic.weights prompt_noise measures how the rewards of a prompt's responses scatter, "
        "and there is one response per prompt: set components.group_sampling.group_size to 2 or "
        "more and components.group_sampling.enabled to true, or critic.weights=none",
    )


def noise_weights_know_the_noise(config: FitConfig) -> Problem | None:
    critic = config.critic
    if critic.weights != "prompt_noise":
        return None
    if critic.loss != "squared_error":
        return Problem(
            ("critic.weights", "critic.loss"),
            "critic.weights prompt_noise is derived for the squared error, whose gradient has the "
            "noise of the return; a cross-entropy's has not: set critic.loss=squared_error, or "
            "critic.weights=none",
        )
    if gives_configured_rewards(config):
        return None
    return Problem(
        ("critic.weights", "rewards.verifier"),
        "critic.weights prompt_noise needs the rewards' range for its floor, and a verifier that "
        "may pay rewards of its own (python, reasoning_gym, reward_model) has none: set "
        "critic.weights=none, or another verifier",
    )


def anchors_ascend(config: FitConfig) -> Problem | None:
    anchors = list(config.critic.anchors)
    is_inside = all(0 < share <= 1 for share in anchors)
    if is_inside and anchors == sorted(set(anchors)):
        return None
    return Problem(
        ("critic.anchors",),
        f"critic.anchors {anchors} must ascend and lie in (0, 1], as shares of the response's "
        "length: [0.3, 0.6, 0.9] is SP3O's",
    )


def late_anchor_is_one_more(config: FitConfig) -> Problem | None:
    critic = config.critic
    if critic.late_anchor is not None and not critic.anchors:
        return Problem(
            ("critic.late_anchor", "critic.anchors"),
            "critic.late_anchor is one more beside critic.anchors, and without these every token "
            "carries value loss: set critic.anchors, or critic.late_anchor=null",
        )
    if critic.late_anchor is None and critic.late_anchor_tokens != CriticConfig.late_anchor_tokens:
        return Problem(
            ("critic.late_anchor_tokens", "critic.late_anchor"),
            "critic.late_anchor_tokens has no effect without critic.late_anchor: set it, or "
            f"critic.late_anchor_tokens={CriticConfig.late_anchor_tokens}",
        )
    return None


def bootstrap_replaces_the_reward(config: FitConfig) -> Problem | None:
    """What reads the reward of a truncated response cannot have it replaced by a value."""
    if not config.critic.bootstrap_truncated:
        return None
    readers = {
        "rewards.overlong.soft_punishment": (
            config.rewards.overlong.soft_punishment,
            "is part of that reward",
            "false",
        ),
        _BASELINE: (
            config.algorithm.baseline.kind != "critic",
            "compares it with other responses' rewards",
            "critic",
        ),
        "critic.weights": (
            config.critic.weights == "prompt_noise",
            "measures how it scatters",
            "none",
        ),
    }
    for key, (reads, why, off) in readers.items():
        if reads:
            return Problem(
                ("critic.bootstrap_truncated", key),
                "critic.bootstrap_truncated replaces a truncated response's reward by the value of "
                f"its last token, and {key} {why}: set {key}={off}, or "
                "critic.bootstrap_truncated=false",
            )
    return None


def baseline_has_values(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    if algorithm.baseline.kind == "critic" or algorithm.advantage_estimator == "gae":
        return None
    return Problem(
        (_BASELINE, _ESTIMATOR),
        f"{_BASELINE} {algorithm.baseline.kind} weighs the advantages of GAE, and {_ESTIMATOR} "
        f"{algorithm.advantage_estimator} makes its own: set {_ESTIMATOR}=gae, or "
        f"{_BASELINE}=critic",
    )


def baseline_has_groups(config: FitConfig) -> Problem | None:
    baseline = config.algorithm.baseline
    is_of_group = isinstance(baseline, (LinearMix, Tether)) or (
        isinstance(baseline, Evpo) and baseline.fallback == "group_mean"
    )
    if not is_of_group or resolve(config).group_size > 1:
        return None
    also = ", or algorithm.baseline.fallback=batch_mean" if isinstance(baseline, Evpo) else ""
    return Problem(
        (_BASELINE, *_GROUP_KEYS),
        f"{_BASELINE} {baseline.kind} has the mean reward of a prompt's responses as a baseline, "
        "and there is one response per prompt: set components.group_sampling.group_size to 2 or "
        f"more and components.group_sampling.enabled to true{also}",
    )


def baseline_is_undiscounted(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    if algorithm.baseline.kind == "critic" or algorithm.gamma == 1:
        return None
    return Problem(
        (_BASELINE, "algorithm.gamma"),
        f"{_BASELINE} {algorithm.baseline.kind} compares values with mean rewards, which are not "
        f"discounted: set algorithm.gamma=1, or {_BASELINE}=critic",
    )


def k_has_its_component(config: FitConfig) -> Problem | None:
    adaptive = config.components.length_adaptive_gae
    if adaptive.k is None or resolve(config).k is not None:
        return None
    key = f"{_ADAPTIVE}.k"
    return Problem(
        (key, f"{_ADAPTIVE}.enabled"),
        f"{key} has no effect while the component is off: set {_ADAPTIVE}.enabled=true, or "
        f"{key}=null",
    )


def surrogate_samples_the_policy(config: FitConfig) -> Problem | None:
    """A nucleus or top-k renormalises the sampled probabilities, and the actor's are not."""
    rollouts = config.rollouts
    if config.algorithm.surrogate not in ("dis", "dppo_tv"):
        return None
    cuts = {
        "rollouts.top_p": (rollouts.top_p < 1, "1"),
        "rollouts.top_k": (rollouts.top_k > 0, "0"),
    }
    for key, (cuts_off, whole) in cuts.items():
        if cuts_off:
            return Problem(
                ("algorithm.surrogate", key),
                f"algorithm.surrogate {config.algorithm.surrogate} compares the policy with the "
                f"probabilities that were sampled from, and {key} renormalises these, so that "
                f"tokens would be dropped before the policy has moved: set {key}={whole}",
            )
    return None


def surrogate_has_one_ratio(config: FitConfig) -> Problem | None:
    """DIS and DPPO: conflicts with everything else that corrects or clips the ratio."""
    algorithm, mismatch = config.algorithm, config.algorithm.mismatch
    if algorithm.surrogate not in ("dis", "dppo_tv"):
        return None
    why = (
        f"algorithm.surrogate {algorithm.surrogate} divides by the rollout policy's own "
        "probability and drops tokens outside a band of it"
    )
    again = "would correct for the engine a second time"
    no_clip = "is of PPO's clip, which it takes the place of"
    fixed = {
        "components.clip_higher.enabled": (
            resolve(config).eps_high != algorithm.eps_low,
            *(no_clip, "false"),
        ),
        "algorithm.dual_clip": (algorithm.dual_clip is not None, no_clip, "null"),
        "algorithm.mismatch.tis_cap": (mismatch.tis_cap is not None, again, "null"),
        "algorithm.mismatch.mask_below": (mismatch.mask_below is not None, again, "null"),
        "algorithm.mismatch.mask_above": (mismatch.mask_above is not None, again, "null"),
    }
    found = {key: item for key, item in fixed.items() if item[0]}
    if found:
        key, (_, reason, _) = next(iter(found.items()))
        fix = ", ".join(f"{name}={item[2]}" for name, item in found.items())
        return Problem(("algorithm.surrogate", *found), f"{why}; {key} {reason}: set {fix}")
    if algorithm.advantage_estimator == "correct_only":
        return Problem(
            ("algorithm.surrogate", _ESTIMATOR),
            f"{why}, and {_ESTIMATOR} correct_only has no policy gradient to correct: it "
            "fine-tunes on correct responses; set algorithm.surrogate=logprob",
        )
    return None


TARGET_RULES: tuple[Rule, ...] = (
    own_estimator_makes_its_targets,
    noise_weights_have_groups,
    noise_weights_know_the_noise,
    anchors_ascend,
    late_anchor_is_one_more,
    bootstrap_replaces_the_reward,
    baseline_has_values,
    baseline_has_groups,
    baseline_is_undiscounted,
    k_has_its_component,
    surrogate_has_one_ratio,
    surrogate_samples_the_policy,
)
