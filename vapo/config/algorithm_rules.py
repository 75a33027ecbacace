"""Rules between the keys of the algorithm, its critic, and the components."""

from __future__ import annotations

from vapo.config.hyperparameters import mismatch_of, resolve
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig


def group_estimator_has_groups(config: FitConfig) -> Problem | None:
    estimator, group_size = config.algorithm.advantage_estimator, resolve(config).group_size
    if not config.algorithm.compares_groups or group_size > 1:
        return None
    is_own = estimator == "function"
    also = ", or algorithm.estimator_compares_groups to false" if is_own else ""
    return Problem(
        (
            "algorithm.advantage_estimator",
            "components.group_sampling.group_size",
            "components.group_sampling.enabled",
        ),
        f"algorithm.advantage_estimator {estimator} compares the responses of a group, and "
        "there is one response per prompt: set components.group_sampling.group_size to 2 or "
        f"more and components.group_sampling.enabled to true{also}",
    )


def critic_free_has_no_critic_parts(config: FitConfig) -> Problem | None:
    estimator, numbers = config.algorithm.advantage_estimator, resolve(config)
    if config.algorithm.has_critic:
        return None
    on = {
        "components.value_pretraining.enabled": numbers.value_pretraining_iterations > 0,
        "components.decoupled_gae.enabled": numbers.lambda_critic is not None,
        "components.length_adaptive_gae.enabled": (numbers.alpha, numbers.k) != (None, None),
    }
    keys = [key for key, is_on in on.items() if is_on]
    if keys:
        switches = ", ".join(f"{key}=false" for key in keys)
        also = ", or algorithm.estimator_uses_critic=true" if estimator == "function" else ""
        return Problem(
            ("algorithm.advantage_estimator", *keys),
            f"algorithm.advantage_estimator {estimator} has no critic, which these components "
            f"work on: set {switches}{also}",
        )
    if config.algorithm.value_clip is not None:
        return Problem(
            ("algorithm.advantage_estimator", "algorithm.value_clip"),
            f"algorithm.value_clip has no effect: algorithm.advantage_estimator {estimator} has "
            "no critic; set algorithm.value_clip=null",
        )
    return None


def dynamic_sampling_has_groups(config: FitConfig) -> Problem | None:
    attempts = config.algorithm.dynamic_sampling_attempts
    if attempts == 0 or resolve(config).group_size > 1:
        return None
    return Problem(
        (
            "algorithm.dynamic_sampling_attempts",
            "components.group_sampling.group_size",
            "components.group_sampling.enabled",
        ),
        f"algorithm.dynamic_sampling_attempts {attempts} drops prompts whose responses are all "
        "right or all wrong, and a single response always is: set "
        "components.group_sampling.group_size to 2 or more and "
        "components.group_sampling.enabled to true",
    )


def on_policy_surrogate_is_on_policy(config: FitConfig) -> Problem | None:
    algorithm, numbers = config.algorithm, resolve(config)
    size = config.training.minibatch_size
    is_whole = size is None or size == numbers.num_prompts * numbers.group_size
    # Fine-tuning on correct responses needs no policy that they were sampled from.
    if algorithm.surrogate != "logprob" or algorithm.advantage_estimator == "correct_only":
        return None
    if is_whole:
        return None
    return Problem(
        ("algorithm.surrogate", "training.minibatch_size"),
        "algorithm.surrogate logprob is the policy gradient in the first optimizer step after "
        "the rollouts only: set training.minibatch_size=null (one step an iteration), or "
        "algorithm.surrogate=clipped_ratio",
    )


def kl_loss_has_a_gradient(config: FitConfig) -> Problem | None:
    """Whatever the coefficient: a run that sets it later must not find out by training."""
    kl = config.algorithm.kl
    if kl.estimator != "k1" or kl.placement != "loss":
        return None
    return Problem(
        ("algorithm.kl.estimator", "algorithm.kl.placement"),
        "algorithm.kl.estimator k1 cannot be a loss term: its gradient is that of log pi alone, "
        "the reference drops out, and its expected gradient is zero, so it would add noise and "
        "hold the policy to nothing: set algorithm.kl.estimator=k2 or k3, or "
        "algorithm.kl.placement=reward",
    )


def stale_rollouts_have_a_ratio(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    is_policy_gradient = (
        algorithm.surrogate == "logprob" and algorithm.advantage_estimator != "correct_only"
    )
    if config.training.max_staleness == 0 or not is_policy_gradient:
        return None
    if mismatch_of(config).tis_cap is not None:
        return None
    return Problem(
        ("training.max_staleness", "algorithm.surrogate", "algorithm.mismatch.correct_stale"),
        "algorithm.surrogate logprob takes its rollouts for the current policy's, and with "
        "training.max_staleness above 0 they are of older ones: set "
        "algorithm.mismatch.correct_stale=true, algorithm.mismatch.tis_cap, or "
        "training.max_staleness=0",
    )


def staleness_keys_need_stale_rollouts(config: FitConfig) -> Problem | None:
    if config.training.max_staleness > 0:
        return None
    switches = {
        "training.update_open_rollouts": config.training.update_open_rollouts,
        "algorithm.mismatch.correct_stale": config.algorithm.mismatch.correct_stale,
    }
    for key, is_default in switches.items():
        if not is_default:
            return Problem(
                (key, "training.max_staleness"),
                f"{key} false has no effect: training.max_staleness is 0, so every rollout is "
                f"sampled with the actor's own weights; set training.max_staleness=1 or more, or "
                f"{key}=true",
            )
    return None


def clip_options_have_a_ratio(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    if algorithm.surrogate != "logprob":
        return None
    options = {
        "components.clip_higher.enabled": (resolve(config).eps_high != algorithm.eps_low, "false"),
        "algorithm.dual_clip": (algorithm.dual_clip is not None, "null"),
    }
    for key, (is_set, off) in options.items():
        if is_set:
            return Problem(
                ("algorithm.surrogate", key),
                f"{key} has no effect: algorithm.surrogate logprob has no ratio to clip; "
                f"set {key}={off}",
            )
    return None


def sequence_reduction_is_used(config: FitConfig) -> Problem | None:
    reduction = config.algorithm.sequence_reduction
    if reduction == "mean" or resolve(config).loss_reduction != "token_mean":
        return None
    key = "components.token_level_loss.enabled"
    return Problem(
        ("algorithm.sequence_reduction", key),
        f"algorithm.sequence_reduction {reduction} has no effect with the token-level loss: "
        f"set {key}=false",
    )


def mismatch_limits_are_used(config: FitConfig) -> Problem | None:
    correction = mismatch_of(config)
    if correction.tis_level == "token" or correction.tis_cap is not None:
        return None
    return Problem(
        ("algorithm.mismatch.tis_level", "algorithm.mismatch.tis_cap"),
        f"algorithm.mismatch.tis_level {correction.tis_level} has no effect while truncated "
        "importance sampling is off: set algorithm.mismatch.tis_cap, or "
        "algorithm.mismatch.tis_level=token",
    )


def mismatch_correction_has_a_policy_gradient(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    if algorithm.advantage_estimator != "correct_only":
        return None
    for name in ("tis_cap", "mask_below", "mask_above"):
        if getattr(algorithm.mismatch, name) is not None:
            key = f"algorithm.mismatch.{name}"
            return Problem(
                ("algorithm.advantage_estimator", key),
                f"{key} corrects a policy gradient, and algorithm.advantage_estimator "
                "correct_only has none: it fine-tunes on correct responses, whichever policy "
                f"they are from; set {key}=null",
            )
    return None


def critic_has_a_start(config: FitConfig) -> Problem | None:
    critic = config.critic
    if not config.algorithm.has_critic or critic.init != "reward_model":
        return None
    if critic.reward_model_path:
        return None
    return Problem(
        ("critic.init", "critic.reward_model_path"),
        "critic.init reward_model needs critic.reward_model_path, the reward model's folder; or "
        "set critic.init=policy, or to the folder of a saved critic",
    )


ALGORITHM_RULES: tuple[Rule, ...] = (
    group_estimator_has_groups,
    dynamic_sampling_has_groups,
    on_policy_surrogate_is_on_policy,
    kl_loss_has_a_gradient,
    stale_rollouts_have_a_ratio,
    staleness_keys_need_stale_rollouts,
    clip_options_have_a_ratio,
    sequence_reduction_is_used,
    mismatch_limits_are_used,
    mismatch_correction_has_a_policy_gradient,
    critic_free_has_no_critic_parts,
    critic_has_a_start,
)
