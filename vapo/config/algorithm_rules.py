"""Rules between the keys of the algorithm and what it works on: estimator, surrogate, baseline."""

from __future__ import annotations

from vapo.config.continuation_rules import bad_segments, unlike_the_rollouts
from vapo.config.data import MixtureSource, sources_of
from vapo.config.estimators import VineOptions
from vapo.config.hyperparameters import mismatch_of, resolve
from vapo.config.rewards import SeveralVerifiers
from vapo.config.rules import Problem, Problems, Rule, changed, without_effect
from vapo.config.schema import FitConfig

_ESTIMATOR = "algorithm.advantage_estimator"
_BASELINE = "algorithm.baseline.kind"


def estimator_has_its_groups(config: FitConfig) -> Problems:
    """Yield a problem for each option that compares responses to a prompt, if there is only one."""
    algorithm, baseline = config.algorithm, config.algorithm.baseline
    if resolve(config).group_size > 1:
        return
    alone = "and there is one response per prompt"
    if algorithm.compares_groups:
        estimator = algorithm.advantage_estimator
        also = "algorithm.estimator_compares_groups to false" if estimator == "function" else ""
        yield _too_few(f"{_ESTIMATOR} {estimator} compares the responses of a group, {alone}", also)
    if (attempts := algorithm.dynamic_sampling_attempts) > 0:
        yield _too_few(
            f"algorithm.dynamic_sampling_attempts {attempts} drops prompts whose responses are "
            "all right or all wrong, and a single response always is"
        )
    if config.critic.weights == "prompt_noise":
        yield _too_few(
            "critic.weights prompt_noise measures how the rewards of a prompt's responses "
            f"scatter, {alone}",
            "critic.weights=none",
        )
    if config.critic.target == "residual":
        yield _too_few(
            "critic.target residual is what is left of a return after the mean reward of the "
            f"prompt's other responses, {alone}",
            "critic.target=return",
        )
    if baseline.is_of_group and baseline.kind != "trusted":  # which takes the batch's others
        also = "algorithm.baseline.fallback=batch_mean" if baseline.kind == "evpo" else ""
        yield _too_few(
            f"{_BASELINE} {baseline.kind} has the mean reward of a prompt's responses as a "
            f"baseline, {alone}",
            also,
        )


def _too_few(reason: str, also: str = "") -> Problem:
    return Problem(
        f"{reason}: set components.group_sampling.group_size to 2 or more and "
        f"components.group_sampling.enabled to true{', or ' if also else ''}{also}"
    )


def surrogate_is_on_policy(config: FitConfig) -> Problems:
    """Check that surrogate logprob, which has no ratio, trains on the current policy's rollouts."""
    algorithm, size = config.algorithm, config.training.minibatch_size
    if algorithm.surrogate != "logprob" or algorithm.advantage_estimator == "correct_only":
        return
    if size not in (None, resolve(config).num_responses):
        yield Problem(
            "algorithm.surrogate logprob is the policy gradient in the first optimizer step after "
            "the rollouts only: set training.minibatch_size=null (one step an iteration), or "
            "algorithm.surrogate=clipped_ratio"
        )
    if config.training.max_staleness > 0 and not mismatch_of(config).weighs:
        yield Problem(
            "algorithm.surrogate logprob assumes that the current policy sampled the rollouts, but "
            "with training.max_staleness above 0 an older one did: set "
            "algorithm.mismatch.correct_stale=true, algorithm.mismatch.tis_cap, or "
            "training.max_staleness=0"
        )


def objective_reads_its_options(config: FitConfig) -> Problems:
    """Yield a problem for each option of the objective that has no effect on its gradient."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    if kl.estimator == "k1" and kl.placement == "loss":
        # Whatever the coefficient: a run that sets it later must not find out by training.
        yield Problem(
            "algorithm.kl.estimator k1 cannot be a loss term: its gradient is that of log pi "
            "alone, the reference drops out, and its expected gradient is zero, so it would add "
            "noise and hold the policy to nothing: set algorithm.kl.estimator=k2 or k3, or "
            "algorithm.kl.placement=reward"
        )
    of_stale = ("training.update_open_rollouts", "algorithm.mismatch.correct_stale")
    for key, *_ in changed(config, of_stale if config.training.max_staleness == 0 else ()):
        yield Problem(
            f"{key} false has no effect: training.max_staleness is 0, so every rollout is sampled "
            f"with the actor's own weights; set training.max_staleness=1 or more, or {key}=true"
        )
    for key, off in _clip_options(config).items() if algorithm.surrogate == "logprob" else ():
        yield Problem(
            f"{key} has no effect: algorithm.surrogate logprob has no ratio to clip; "
            f"set {key}={off}"
        )
    if not algorithm.whiten_advantages:
        floor = ("algorithm.whitening_floor",)
        yield from without_effect(config, floor, "algorithm.whiten_advantages is false")
    reduction = algorithm.sequence_reduction
    if reduction != "mean" and resolve(config).loss_reduction == "token_mean":
        yield Problem(
            f"algorithm.sequence_reduction {reduction} has no effect with the token-level loss: "
            "set components.token_level_loss.enabled=false"
        )


def _clip_options(config: FitConfig) -> dict[str, str]:
    """Return the options of PPO's clip that are on, each with the value that turns it off."""
    options = {}
    if resolve(config).eps_high != config.algorithm.eps_low:
        options["components.clip_higher.enabled"] = "false"
    if config.algorithm.dual_clip is not None:
        options["algorithm.dual_clip"] = "null"
    return options


def mismatch_corrects_a_policy_gradient(config: FitConfig) -> Problems:
    level = config.algorithm.mismatch.tis_level
    if level != "token" and mismatch_of(config).tis_cap is None:
        yield Problem(
            f"algorithm.mismatch.tis_level {level} has no effect while truncated importance "
            "sampling is off: set algorithm.mismatch.tis_cap, or algorithm.mismatch.tis_level=token"
        )
    mismatch = config.algorithm.mismatch
    if mismatch.icepop and mismatch.tis_cap is not None:
        yield Problem(
            "algorithm.mismatch.icepop and algorithm.mismatch.tis_cap are two weights for the same "
            "tokens: set algorithm.mismatch.tis_cap=null, or algorithm.mismatch.icepop=false"
        )
    if not mismatch.icepop:
        band = ("algorithm.mismatch.icepop_low", "algorithm.mismatch.icepop_high")
        yield from without_effect(config, band, "algorithm.mismatch.icepop is off")
    if config.algorithm.advantage_estimator == "correct_only":
        for key, off in _mismatch_options(config).items():
            yield Problem(
                f"{key} corrects a policy gradient, but {_ESTIMATOR} correct_only has no policy "
                "gradient: it fine-tunes on correct responses, whichever policy they are from; "
                f"set {key}={off}"
            )


def _mismatch_options(config: FitConfig) -> dict[str, str]:
    """Return the mismatch options that are on, each with the value that turns it off."""
    names, mismatch = ("tis_cap", "mask_below", "mask_above"), config.algorithm.mismatch
    limits = [f"algorithm.mismatch.{n}" for n in names if getattr(mismatch, n) is not None]
    icepop = {"algorithm.mismatch.icepop": "false"} if mismatch.icepop else {}
    return dict.fromkeys(limits, "null") | icepop


_INSTEAD_OF_CLIP = {
    "gspo": "clips the ratio of a whole response",
    "cispo": "clips the weight of a token's gradient",
    "dis": "divides by the rollout policy's own probability and drops tokens outside a band of it",
}
_INSTEAD_OF_CLIP["dppo_tv"] = _INSTEAD_OF_CLIP["dis"]


def surrogate_has_one_ratio(config: FitConfig) -> Problems:
    """Yield a problem for each option that conflicts with surrogate gspo, cispo, dis or dppo_tv.

    Such an option clips, weighs or corrects the ratio a second time.
    """
    surrogate, rollouts = config.algorithm.surrogate, config.rollouts
    if surrogate not in _INSTEAD_OF_CLIP:
        return
    why = f"algorithm.surrogate {surrogate} {_INSTEAD_OF_CLIP[surrogate]}"
    divides_by_rollouts = config.algorithm.ratio_to == "rollout_policy"
    clips, weights = _clip_options(config), _length_weights(config)
    conflicts = clips | weights | (_mismatch_options(config) if divides_by_rollouts else {})
    if conflicts:
        reason = "would correct for the engine a second time"
        if clips:
            reason = "sets PPO's clip, which is not used then"
        elif weights:
            reason = "weighs responses by their lengths, and its loss is a mean over responses"
        fix = ", ".join(f"{key}={off}" for key, off in conflicts.items())
        yield Problem(f"{why}; {next(iter(conflicts))} {reason}: set {fix}")
    if config.algorithm.advantage_estimator == "correct_only":
        yield Problem(
            f"{why}, and {_ESTIMATOR} correct_only has no policy gradient to correct: it "
            "fine-tunes on correct responses; set algorithm.surrogate=logprob"
        )
    cuts = {"rollouts.top_p": (rollouts.top_p < 1, 1), "rollouts.top_k": (rollouts.top_k > 0, 0)}
    for key, (cuts_off, whole) in cuts.items():
        if cuts_off and divides_by_rollouts:
            yield Problem(
                f"algorithm.surrogate {surrogate} compares the policy with the "
                f"probabilities that were sampled from, but {key} renormalises these, so that "
                f"tokens would be dropped before the policy has moved: set {key}={whole}"
            )


def rewards_are_compared_apart(config: FitConfig) -> Problems:
    """Check that estimator group_relative_apart (GDPO) has the rewards of several verifiers.

    Nothing may be added to the sum of these rewards.
    """
    algorithm, estimator = config.algorithm, "group_relative_apart"
    if algorithm.advantage_estimator != estimator:
        return
    why = f"{_ESTIMATOR} {estimator} compares the rewards of several verifiers apart"
    instead = f"{_ESTIMATOR}=group_relative"
    if not isinstance(config.rewards, SeveralVerifiers):
        yield Problem(
            f"{why}, but rewards.verifier is {config.rewards.verifier}: set "
            f"rewards.verifier=several, or {instead}"
        )
    for key, source in sources_of(config.data, "train").items():
        if isinstance(source, MixtureSource) and source.verifier is not None:
            yield Problem(
                f"{why}, but {key} names one verifier for its rows: set {key}.verifier=null, or "
                f"{instead}"
            )
    if config.rewards.overlong.soft_punishment:
        yield Problem(
            f"{why}, but rewards.overlong.soft_punishment is added to their sum: set it to false, "
            f"or {instead}"
        )
    if algorithm.kl.coef > 0 and algorithm.kl.placement == "reward":
        yield Problem(
            f"{why}, but algorithm.kl.placement reward adds to their sum: set "
            f"algorithm.kl.placement=loss, or {instead}"
        )


def _length_weights(config: FitConfig) -> dict[str, str]:
    """Return the key and the value that make GSPO's loss a mean over responses.

    The result is empty for other surrogates, and if the loss is that mean already. A token mean or
    a sum over tokens weighs a response by its length.
    """
    reduction = resolve(config).loss_reduction
    if config.algorithm.surrogate != "gspo" or reduction == "sequence_mean":
        return {}
    if reduction == "token_mean":
        return {"components.token_level_loss.enabled": "false"}
    return {"algorithm.sequence_reduction": "mean"}


def baseline_weighs_values(config: FitConfig) -> Problems:
    algorithm = config.algorithm
    kind, estimator = algorithm.baseline.kind, algorithm.advantage_estimator
    if kind == "critic":
        return
    if estimator != "gae":
        yield Problem(
            f"{_BASELINE} {kind} weighs the advantages of GAE, but {_ESTIMATOR} {estimator} makes "
            f"its own: set {_ESTIMATOR}=gae, or {_BASELINE}=critic"
        )
    if algorithm.gamma != 1:
        yield Problem(
            f"{_BASELINE} {kind} compares values with mean rewards, which are not discounted: set "
            f"algorithm.gamma=1, or {_BASELINE}=critic"
        )


def vine_continues_what_was_sampled(config: FitConfig) -> Problems:
    """Check that estimator vine samples and judges continuations as rollouts, and has gamma 1."""
    algorithm = config.algorithm
    if not isinstance(algorithm, VineOptions):
        return
    yield from unlike_the_rollouts(config, _ESTIMATOR)
    yield from bad_segments("algorithm.vine_segments", algorithm.vine_segments)
    if algorithm.gamma != 1:
        yield Problem(
            f"{_ESTIMATOR} vine compares the mean rewards of continuations, which are not "
            f"discounted, but algorithm.gamma is {algorithm.gamma:g}: set algorithm.gamma=1"
        )


def stopping_watchers_see_something(config: FitConfig) -> Problems:
    """Yield a problem for each watcher that may stop the run but can never see a reason to."""
    algorithm, size = config.algorithm, config.training.minibatch_size
    blind: list[tuple[str, str, str]] = []
    if not algorithm.has_critic:
        reason = f"{_ESTIMATOR} {algorithm.advantage_estimator} has no critic"
        blind += [(name, _ESTIMATOR, reason) for name in ("explained_variance", "value_bias")]
    if algorithm.surrogate == "logprob":
        reason = "algorithm.surrogate logprob has no ratio to clip"
        blind.append(("clip_fraction", "algorithm.surrogate", reason))
    if size in (None, resolve(config).num_responses):
        reason = "with one optimizer step an iteration the policy is still the old one"
        blind += [(n, "training.minibatch_size", reason) for n in ("clip_fraction", "approx_kl")]
    for name, because_of, reason in blind:
        key = f"watch.{name}.action"
        if getattr(config.watch, name).action == "stop":
            yield Problem(
                f"{key} stop has no effect: {reason}; set {key}=ignore", (key, because_of)
            )


ALGORITHM_RULES: tuple[Rule, ...] = (
    estimator_has_its_groups,
    surrogate_is_on_policy,
    objective_reads_its_options,
    mismatch_corrects_a_policy_gradient,
    surrogate_has_one_ratio,
    rewards_are_compared_apart,
    baseline_weighs_values,
    vine_continues_what_was_sampled,
    stopping_watchers_see_something,
)
