"""The block `watch`: how many bad updates a run may have, and the limits of its watchers.

The defaults are outside of what healthy runs of the shipped tasks show: docs/watching.md has
the figures. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vapo.config.kinds import option, section

Action = Literal["warn", "stop", "ignore"]


@dataclass
class Watcher:
    """A limit on one metric of each iteration, and what happens when it is passed."""

    limit: float = option(0.0, "the limit")
    patience: int = option(3, "iterations in a row beyond the limit after which it acts", ge=1)
    action: Action = option(
        "warn",
        "warn: say so once, and go on; stop: also end the run, with exit code 3; ignore: not "
        "watched",
    )


@dataclass
class EntropyWatcher(Watcher):
    limit: float = option(0.05, "least actor/entropy, as a share of the run's first", gt=0, lt=1)


@dataclass
class ResponseLengthWatcher(Watcher):
    limit: float = option(
        0.5, "least rollout/response_length_mean, as a share of the run's first", gt=0, lt=1
    )


@dataclass
class ExplainedVarianceWatcher(Watcher):
    limit: float = option(0.0, "least critic/explained_variance, once the policy is trained", lt=1)
    patience: int = option(10, "iterations in a row beyond the limit after which it acts", ge=1)


@dataclass
class CriticTrustWatcher(Watcher):
    limit: float = option(
        0.05, "least baseline/within_weight, with algorithm.baseline.kind trusted", gt=0, lt=1
    )
    patience: int = option(10, "iterations in a row beyond the limit after which it acts", ge=1)


@dataclass
class ValueBiasWatcher(Watcher):
    limit: float = option(
        0.3,
        "most critic/value_bias_share, the values' mean error as a share of the returns' standard "
        "deviation, once the policy is trained",
        gt=0,
    )
    patience: int = option(5, "iterations in a row beyond the limit after which it acts", ge=1)


@dataclass
class LogprobGapWatcher(Watcher):
    limit: float = option(0.1, "most rollout/logprob_gap_mean, in nats", gt=0)


@dataclass
class ClipFractionWatcher(Watcher):
    limit: float = option(
        0.2,
        "most actor/clip_fraction_low + actor/clip_fraction_high, mean over the iteration",
        gt=0,
        lt=1,
    )


@dataclass
class ApproxKLWatcher(Watcher):
    limit: float = option(0.1, "most actor/approx_kl, in nats, mean over the iteration", gt=0)


@dataclass
class TruncationRateWatcher(Watcher):
    limit: float = option(0.5, "most rollout/truncation_rate", gt=0, lt=1)


@dataclass
class WatchConfig:
    """Limits on bad updates, and the watchers of each iteration's metrics (docs/watching.md)."""

    max_bad_updates: int = option(
        5,
        "updates of a network in a row that may be skipped because a number is not finite; then "
        "the run ends, with exit code 3",
        ge=1,
    )
    max_saved_rollouts: int = option(
        64, "rollouts with numbers that are not finite, written by each process at most", ge=0
    )
    entropy: EntropyWatcher = section(EntropyWatcher, "the policy becomes deterministic")
    response_length: ResponseLengthWatcher = section(
        ResponseLengthWatcher, "responses become short"
    )
    explained_variance: ExplainedVarianceWatcher = section(
        ExplainedVarianceWatcher, "the critic explains nothing"
    )
    critic_trust: CriticTrustWatcher = section(
        CriticTrustWatcher, "a trusted baseline makes no use of the critic"
    )
    value_bias: ValueBiasWatcher = section(
        ValueBiasWatcher, "the critic's values are too high or too low on average"
    )
    logprob_gap: LogprobGapWatcher = section(
        LogprobGapWatcher, "the sampling engine's policy is not the trainer's"
    )
    clip_fraction: ClipFractionWatcher = section(
        ClipFractionWatcher, "updates run into the clip bounds"
    )
    approx_kl: ApproxKLWatcher = section(ApproxKLWatcher, "updates go far from the old policy")
    truncation_rate: TruncationRateWatcher = section(
        TruncationRateWatcher, "responses do not end within their budget"
    )

    def watchers(self) -> dict[str, Watcher]:
        """Return the watchers that are not ignored, by name."""
        by_name = {name: value for name, value in vars(self).items() if isinstance(value, Watcher)}
        return {name: watcher for name, watcher in by_name.items() if watcher.action != "ignore"}
