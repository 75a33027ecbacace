"""Rules of the block `watch`: a watcher that may stop the run must have something to see."""

from __future__ import annotations

from vapo.config.hyperparameters import resolve
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig


def stopping_watchers_see_something(config: FitConfig) -> Problem | None:
    algorithm, numbers = config.algorithm, resolve(config)
    size = config.training.minibatch_size
    one_step = (
        size is None or size == numbers.num_prompts * numbers.group_size,
        "training.minibatch_size",
        "with one optimizer step an iteration the policy is still the old one",
    )
    no_critic = (
        not algorithm.has_critic,
        "algorithm.advantage_estimator",
        f"algorithm.advantage_estimator {algorithm.advantage_estimator} has no critic",
    )
    no_ratio = (
        algorithm.surrogate == "logprob",
        "algorithm.surrogate",
        "algorithm.surrogate logprob has no ratio to clip",
    )
    blind = {
        "explained_variance": [no_critic],
        "clip_fraction": [no_ratio, one_step],
        "approx_kl": [one_step],
    }
    for name, reasons in blind.items():
        key = f"watch.{name}.action"
        for is_blind, other_key, reason in reasons:
            if is_blind and getattr(config.watch, name).action == "stop":
                return Problem(
                    (key, other_key),
                    f"{key} stop has no effect: {reason}; set {key}=ignore",
                )
    return None


WATCH_RULES: tuple[Rule, ...] = (stopping_watchers_see_something,)
