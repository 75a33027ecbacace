"""The rules of the watchers, which warn if a metric stays beyond its limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from vapo.config.watch import WatchConfig, Watcher

Metrics = Mapping[str, float]


class Sign(NamedTuple):
    """The figure that a watcher checks, its likely cause, and what to try.

    Attributes:
        metrics: the figure is the sum of these metrics.
        switch: config keys to try if a run has no metric of `switches`.
        is_floor: whether figures below the limit are bad. Otherwise those above it are.
        of_first: whether the figure is divided by the run's first one.
        of_policy_phase: whether it is not checked in value pretraining, which has to mend it.
        switches: metrics that tell causes apart -> what to try if the metric is the largest.
    """

    metrics: tuple[str, ...]
    symptom: str
    cause: str
    switch: str
    is_floor: bool = False
    of_first: bool = False
    of_policy_phase: bool = False
    switches: Mapping[str, str] = MappingProxyType({})


SIGNS = {
    "entropy": Sign(
        ("actor/entropy",),
        "the policy's entropy collapses",
        "the policy repeats what it found first and explores no more",
        "components.clip_higher.eps_high up, actor.optimizer.lr down, or algorithm.entropy_coef",
        is_floor=True,
        of_first=True,
    ),
    "response_length": Sign(
        ("rollout/response_length_mean",),
        "responses become short",
        "the value model undervalues unfinished responses, or short ones are paid as well",
        "components.value_pretraining, components.decoupled_gae.lambda_critic=1",
        is_floor=True,
        of_first=True,
    ),
    "explained_variance": Sign(
        ("critic/explained_variance",),
        "the critic explains none of the returns",
        "it does not keep up with the policy, or rewards have nothing to do with responses",
        "critic.optimizer.lr (of a probe critic.probe.lr), more "
        "components.value_pretraining.num_iterations; check the rewards",
        is_floor=True,
        of_policy_phase=True,
    ),
    "value_bias": Sign(
        ("critic/value_bias_share",),
        "the critic's values are too high or too low on average",
        "it lags behind a policy whose rewards change, or its steps are too large to settle",
        "critic.optimizer.lr (of a probe critic.probe.lr) or actor.optimizer.lr; or "
        "components.length_adaptive_gae.enabled=false and algorithm.lambda_policy=1, where "
        "whitening takes a constant away",
        of_policy_phase=True,
    ),
    "critic_trust": Sign(
        ("baseline/within_weight",),
        "the critic has earned no trust within responses, and is not used there",
        "its values do not predict which responses will fail",
        "algorithm.advantage_estimator=leave_one_out with algorithm.lambda_policy=1 and without "
        "length_adaptive_gae, which has the same advantages and costs no critic; or a critic that "
        "knows more: docs/critics.md",
        is_floor=True,
    ),
    "logprob_gap": Sign(
        ("rollout/logprob_gap_mean",),
        "the sampling engine's log-probs are not the trainer's",
        "the engine's dtype or kernels, rollouts.top_p or top_k, or weights that did not arrive",
        "rollouts.vllm dtype as the trainer's, rollouts.top_p=1, or algorithm.mismatch.tis_cap",
    ),
    "clip_fraction": Sign(
        ("actor/clip_fraction_low", "actor/clip_fraction_high"),
        "many tokens are clipped",
        "the policy moves too far within an iteration",
        "actor.optimizer.lr down, training.minibatch_size up",
    ),
    "approx_kl": Sign(
        ("actor/approx_kl",),
        "the policy moves far from the one that sampled",
        "updates are too large, or some tokens become very unlikely",
        "actor.optimizer.lr down, actor.optimizer.max_grad_norm down, algorithm.kl.coef",
    ),
    "truncation_rate": Sign(
        ("rollout/truncation_rate",),
        "responses do not end within their budget",
        "the budget is too small, or the policy rambles",
        "rollouts.max_response_tokens up, rewards.overlong.soft_punishment=true",
        switches={
            "rollout/truncated_by_tokens_rate": "rollouts.max_response_tokens up, which counts "
            "observations, or environment.max_observation_tokens down",
            "rollout/truncated_by_turn_tokens_rate": "environment.max_turn_tokens up: a turn that "
            "it cuts ends its episode",
            "rollout/truncated_by_turns_rate": "environment.max_turns up, or a limit of the "
            "environment's own that is lower",
        },
    ),
}


@dataclass
class OverLimit:
    """The iterations in a row in which a figure has been beyond its limit.

    Attributes:
        since: the first of these iterations.
        count: how many they are.
        alarmed: whether the alarm for them was given.
    """

    since: int
    count: int = 0
    alarmed: bool = False


@dataclass
class WatcherState:
    """A watcher of one figure, with its state through a run.

    Attributes:
        name: the watcher's name, a key of `SIGNS`.
        watcher: its limit and patience, from the config.
        first: the run's first figure, if figures are divided by it; else None.
        episode: the iterations beyond the limit; None while the figure is within it.
        figure: the latest figure.
        switch: what to try against the alarm.
    """

    name: str
    watcher: Watcher
    first: float | None = None
    episode: OverLimit | None = None
    figure: float = math.nan
    switch: str = ""

    @property
    def sign(self) -> Sign:
        return SIGNS[self.name]

    def check_metrics(self, iteration: int, metrics: Metrics) -> bool | None:
        """Check an iteration's metrics, and return whether the watcher is in alarm.

        It is in alarm if its figure has been beyond the limit for `patience` iterations in a row.
        If the figure is unknown, the result is None, and the iteration does not count.
        """
        figures = [metrics.get(key, math.nan) for key in self.sign.metrics]
        if not all(map(math.isfinite, figures)):
            return None
        figure = math.fsum(figures)
        if self.sign.of_first:
            if self.first is None:
                self.first = figure
            if self.first <= 0:
                return None
            figure /= self.first
        self.figure, self.switch = figure, self._switch(metrics)
        limit = self.watcher.limit
        if not (figure < limit if self.sign.is_floor else figure > limit):
            self.episode = None
            return False
        self.episode = self.episode or OverLimit(iteration)
        self.episode.count += 1
        return self.episode.count >= self.watcher.patience

    @property
    def may_stop(self) -> bool:
        """Whether the figure is beyond its limit, and the alarm would stop the run."""
        return self.episode is not None and self.watcher.action == "stop"

    def describe_count(self) -> str:
        """Return a text on how many of `patience` iterations the figure has been beyond its
        limit.
        """
        assert self.episode is not None
        count = f"{self.episode.count} of {self.watcher.patience} iterations"
        return f"watch.{self.name} has counted {count} before it stops the run"

    def describe(self) -> str:
        """Return the alarm as text: symptom, figure, limit, and the iteration when it began."""
        assert self.episode is not None
        sign, figure = self.sign, f"is {self.figure:.3g}"
        if sign.of_first:
            figure = f"is {100 * self.figure:.3g} % of what it was in the run's first iteration"
        bound = "below" if sign.is_floor else "above"
        return (
            f"{sign.symptom}: {' + '.join(sign.metrics)} {figure}; it has been {bound} "
            f"watch.{self.name}.limit {self.watcher.limit:g} since iteration {self.episode.since}"
        )

    def advise(self) -> str:
        return f"likely: {self.sign.cause}; try: {self.switch}"

    def _switch(self, metrics: Metrics) -> str:
        """Return what the user should try against the alarm, by the iteration's metrics."""
        causes = {key: metrics[key] for key in self.sign.switches if key in metrics}
        if not causes:
            return self.sign.switch
        return self.sign.switches[max(causes, key=causes.__getitem__)]

    def state_dict(self) -> dict[str, Any]:
        episode = None if self.episode is None else vars(self.episode)
        return {"first": self.first, "episode": episode}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = state["first"]
        self.episode = None if state["episode"] is None else OverLimit(**state["episode"])


def useless_critic(
    watch: WatchConfig, after_pretraining: float | None, at_end: float | None
) -> str | None:
    """Say that the critic knows nothing at a run's end, and what to try; None where it knows more.

    It knows nothing if its mean explained variance, to two digits, is not above the limit of the
    watcher `explained_variance`, unless that is ignored.

    Args:
        after_pretraining, at_end: mean explained variances; None where they were not measured.
    """
    watcher = watch.explained_variance
    if at_end is None or watcher.action == "ignore" or round(at_end, 2) > watcher.limit:
        return None
    cause = "it never knew more"
    if after_pretraining is None:
        cause = "it had no value pretraining to learn in"
    elif round(after_pretraining, 2) > watcher.limit:
        cause = (
            "it did before the policy moved, so it does not keep up, or the policy's rewards are "
            "nearly all equal now"
        )
    return (
        "the critic knows nothing of the returns at the end: a constant would explain as much "
        f"({cause}), so its values are noise in the advantages; try "
        f"{SIGNS['explained_variance'].switch}; or a method without a critic, as "
        "conf/algorithm/grpo.yaml"
    )
