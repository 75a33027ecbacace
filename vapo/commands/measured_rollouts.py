"""`vapo rollouts --value_truth`: what prefixes of its responses are worth, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from vapo.advantages.credit import critic_rewards
from vapo.commands.command_rules import check_measuring
from vapo.config import FitConfig
from vapo.diagnostics.value_truth.choice import expected_tokens
from vapo.rollouts.continuations import Continuer, MeasuredState, Place, by_state
from vapo.rollouts.segments import step_starts
from vapo.rollouts.stored_columns import returns_settings
from vapo.types import Rollout


@dataclass(frozen=True)
class Measuring:
    """K continuations from every step start of the responses of a share of the groups."""

    num_continuations: int
    share: float

    def settings(self, config: FitConfig) -> dict[str, Any]:
        """What decides the measured values, as the file's metadata have it."""
        return {
            "num_continuations": self.num_continuations,
            "share": self.share,
            "segments": asdict(config.value_truth.segments),
            **returns_settings(config),
        }

    def is_measured(self, group: int) -> bool:
        """Whether a group is among the share, which is spread evenly over all of them."""
        return int((group + 1) * self.share + 1e-9) > int(group * self.share + 1e-9)

    def most(self, config: FitConfig, num_groups: int, group_size: int) -> str:
        """What it costs at most, before a response is known."""
        groups = sum(map(self.is_measured, range(num_groups)))
        segments = config.value_truth.segments.max_segments
        prefixes = groups * group_size * segments
        total = prefixes * self.num_continuations
        tokens = total * config.rollouts.max_response_tokens
        return (
            f"--value_truth {self.num_continuations}: {groups} of {num_groups} groups, at most "
            f"{segments} prefixes of each of {groups * group_size:,} responses, so at most "
            f"{prefixes:,} prefixes, {total:,} continuations and {tokens:,} tokens"
        )


def measuring_of(
    config: FitConfig, value_truth: int | None, truth_share: float | None
) -> Measuring | None:
    """What the command's options ask for; None: nothing.

    Raises: UserError naming the option.
    """
    check_measuring(config, value_truth, truth_share)
    if value_truth is None:
        return None
    return Measuring(value_truth, 1.0 if truth_share is None else truth_share)


def measure_step_starts(
    rollouts: Sequence[Rollout],
    groups: Sequence[int],
    measuring: Measuring | None,
    continuer: Continuer,
    *,
    seed: int,
    note: Callable[[str], None],
) -> tuple[list[list[MeasuredState]], int]:
    """Continue the responses of the groups that are measured from the start of each of their steps.

    What it costs is said before. Returns each response's measured states, and the tokens sampled.
    """
    config = continuer.config
    found: list[list[MeasuredState]] = [[] for _ in rollouts]
    places = [
        Place(row, start)
        for row, (rollout, group) in enumerate(zip(rollouts, groups, strict=True))
        if measuring is not None and measuring.is_measured(group) and not rollout.is_lost
        for start in step_starts(rollout, config.value_truth.segments, continuer.player.tokenizer)
    ]
    if measuring is None or not places:  # perhaps all episodes were lost to their environment
        return found, 0
    k, num_states = measuring.num_continuations, len(by_state(rollouts, places))
    about = expected_tokens(rollouts, places, k)
    note(
        f"{num_states:,} prefixes of {len({place.row for place in places}):,} responses, "
        f"{k * num_states:,} continuations, about {about:,} tokens"
    )
    made = continuer.sample(rollouts, places, num_continuations=k, seed=seed)
    measured = made.measured(critic_rewards(made.batch, config), gamma=config.algorithm.gamma)
    for place in places:
        if place in measured:  # else a continuation was lost to the environment
            found[place.row].append(measured[place])
    return found, made.num_sampled_tokens


def stored_truth_metrics(table: pa.Table, num_sampled_tokens: int) -> dict[str, float]:
    """What was measured, and from how many tokens; keys as docs/metrics.md has them."""
    lists = (table.column(name).to_pylist() for name in ("truth_rows", "truth_noise"))
    sharing, noise = ([x for row in rows if row for x in row] for rows in lists)
    return {
        "rollouts/num_measured_prefixes": float(round(sum(1 / rows for rows in sharing))),
        "rollouts/truth_noise": sum(noise) / max(len(noise), 1),
        "rollouts/num_continuation_tokens": float(num_sampled_tokens),
    }


def describe_stored_truth(metrics: Mapping[str, float]) -> str:
    """One line for the console."""
    return (
        f"{metrics['rollouts/num_measured_prefixes']:.0f} prefixes were continued, in "
        f"{metrics['rollouts/num_continuation_tokens']:.0f} tokens; the variance of a mean is "
        f"{metrics['rollouts/truth_noise']:.3f}"
    )
