"""Sample on from states of a rollout batch, and keep what they are worth beside the critic."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.advantages.credit import critic_rewards
from vapo.advantages.value_loss_columns import reward_range
from vapo.config import FitConfig, resolve
from vapo.config.critic_rules import gives_configured_rewards
from vapo.config.hyperparameters import critic_is_punished
from vapo.diagnostics.value_truth.choice import choose_places
from vapo.diagnostics.value_truth.figure import Figure
from vapo.diagnostics.value_truth.figures import TruthFigures, truth_figures
from vapo.diagnostics.value_truth.points import Outcomes, TruthPoint
from vapo.functional.baselines import mean_of_others
from vapo.prompts.procedural import OWN_CHECKS
from vapo.rollouts.continuations import Continuer
from vapo.rollouts.engines.contract import sampled_text
from vapo.system.distributed import gather_objects, sum_over_ranks, world_size
from vapo.types import Prompt, Rollout, RolloutBatch


@dataclass(frozen=True)
class ValueTruth:
    """A measurement: this rank's points, of rows of its batch, and all ranks' figures.

    `outcomes`: the two returns that there are, where there are two. `num_tokens` were sampled.
    """

    points: Sequence[TruthPoint]
    figures: TruthFigures
    outcomes: Outcomes = None
    num_tokens: int = 0

    @property
    def rows(self) -> frozenset[int]:
        """The responses that were continued from every step; without any, those with a point."""
        of_steps = frozenset(point.row for point in self.points if point.is_of_steps)
        return of_steps or frozenset(point.row for point in self.points)

    def on_rows(self, rows: Sequence[int]) -> ValueTruth:
        """The same on a smaller batch, which has these rows alone."""
        return replace(self, points=on_rows(self.points, rows))


def measure_truth(
    batch: RolloutBatch,
    continuer: Continuer,
    *,
    seed: int,
    note: Callable[[str], None],
    groups_are_chosen: bool = False,
) -> tuple[list[TruthPoint], int]:
    """Sample on from states of the batch; the points, without values, and the tokens sampled.

    Says what it costs before it begins. Every rank must call this, with its own batch.

    Args:
        groups_are_chosen: by their rewards (dynamic sampling): then the mean reward of the other
            responses to a prompt is no estimate of its value, and points have no baseline.
    """
    config = continuer.config
    truth, most = config.value_truth, continuer.settings.max_response_tokens
    for name in ("num_responses", "num_prefixes", "max_tokens"):  # shared by the ranks
        if (number := getattr(truth, name)) is not None:
            truth = replace(truth, **{name: -(-number // world_size())})
    rollouts, tokenizer = batch.rollouts, continuer.player.tokenizer
    choice = choose_places(rollouts, truth, tokenizer, seed=seed)
    note(choice.describe(rollouts, truth, most))
    found = continuer.sample(
        rollouts, choice.places, num_continuations=truth.num_continuations, seed=seed
    )
    gamma = resolve(config).gamma
    measured = found.measured(critic_rewards(found.batch, config), gamma=gamma)
    baselines: list[float | None] = [None] * len(batch)
    if not groups_are_chosen:
        baselines = other_means(batch, critic_rewards(batch, config))
    points = [
        TruthPoint(
            **asdict(measured[place]),
            prompt_id=label_of(rollouts[place.row].prompt),
            length=len(rollouts[place.row].response_ids),
            baseline=baselines[place.row],
            is_of_steps=is_of_steps,
            is_marked=own_mark(config, rollouts[place.row], place.num_tokens, tokenizer),
        )
        for place, is_of_steps in zip(choice.places, choice.of_steps, strict=True)
        if place in measured
    ]
    if len(points) < len(choice.places):
        note(
            f"value truth: {len(choice.places) - len(points)} prefixes are left out, because the "
            "environment failed in a continuation"
        )
    return points, found.num_sampled_tokens


def own_mark(
    config: FitConfig, rollout: Rollout, num_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> bool | None:
    """Whether the check that ends so many tokens of the response calls its step wrong; None where
    there is none, or the task has no checks."""
    own_check = OWN_CHECKS.get(getattr(config.data.train, "task", ""))
    if own_check is None or not all(rollout.is_sampled):
        return None
    return own_check(sampled_text(rollout.response_ids[:num_tokens], tokenizer))


def label_of(prompt: Prompt) -> str:
    """The prompt's id with its source, and a number for its tokens: ids may come twice."""
    number = zlib.crc32(repr(prompt.prompt_ids).encode())
    return f"{prompt.source}{' ' * bool(prompt.source)}{prompt.prompt_id} ({number:08x})"


def other_means(batch: RolloutBatch, rewards: Float[Tensor, " B"]) -> list[float | None]:
    """For each response the mean reward of the others to its prompt; None where there are none,
    or one was lost to its environment."""
    size = batch.group_size
    if size == 1:
        return [None] * len(batch)
    means = mean_of_others(rewards.double(), group_size=size).tolist()
    is_whole = ~batch.is_lost.view(-1, size).any(dim=1).repeat_interleave(size)
    return [m if whole else None for m, whole in zip(means, is_whole.tolist(), strict=True)]


def on_rows(points: Sequence[TruthPoint], rows: Sequence[int]) -> list[TruthPoint]:
    """The points of these rows of a batch, as a smaller batch numbers them that has them alone."""
    numbers = {row: number for number, row in enumerate(rows)}
    return [replace(point, row=numbers[point.row]) for point in points if point.row in numbers]


def with_values(
    points: Sequence[TruthPoint], values: Float[Tensor, "B T"] | None
) -> list[TruthPoint]:
    """The points with the critic's values of their states; those that are not finite are left
    out."""
    if values is None:
        return list(points)
    found = [replace(p, value=float(values[p.row, p.num_tokens])) for p in points]
    return [point for point in found if point.value is not None and math.isfinite(point.value)]


def outcomes_of(config: FitConfig) -> Outcomes:
    """The two returns that there are; None where there are others in between."""
    plain = gives_configured_rewards(config) and config.algorithm.gamma == 1
    return reward_range(config) if plain and not critic_is_punished(config) else None


def beside_values(
    points: Sequence[TruthPoint],
    num_tokens: int,
    values: Float[Tensor, "B T"] | None,
    config: FitConfig,
    *,
    seed: int,
) -> ValueTruth | None:
    """The critic's values beside what was measured of the same rows; None where nothing could be.

    Every rank must call this.
    """
    own, outcomes = with_values(points, values), outcomes_of(config)
    first, everything = 0, []
    for theirs in gather_objects(own):  # a row of one rank is not that of another
        everything += [replace(point, row=first + point.row) for point in theirs]
        first += 1 + max((point.row for point in theirs), default=0)
    total = sum_over_ranks(torch.tensor(num_tokens))
    if not everything:
        return None
    figures = truth_figures(everything, outcomes=outcomes, seed=seed)
    return ValueTruth(own, figures, outcomes, int(total))


def describe_truth(figures: TruthFigures) -> str:
    """A line a figure, with its interval; those that are not known are left out."""
    rows = [f"truth/num_mistakes: {figures.num_mistakes}"]
    for name, x in known_figures(figures).items():
        limits = f"[{x.low:.4f}, {x.high:.4f}]" if x.is_bounded else "no interval"
        rows.append(f"truth/{name}: {x.value:.4f} {limits}")
    return "\n".join(rows)


def truth_metrics(truth: ValueTruth) -> dict[str, float]:
    """The figures as metrics (docs/metrics.md).

    A chart shows no interval: those that are not known, or could be anything, are left out.
    """
    figures = truth.figures
    names = ("num_prefixes", "num_responses", "num_mistakes")
    metrics = {f"truth/{name}": float(getattr(figures, name)) for name in names}
    metrics["truth/num_continuation_tokens"] = float(truth.num_tokens)
    known = known_figures(figures).items()
    return metrics | {f"truth/{name}": x.value for name, x in known if x.is_bounded}


def known_figures(figures: TruthFigures) -> dict[str, Figure]:
    """The figures that could be estimated, by name."""
    return {
        f.name: figure
        for f in fields(figures)
        if isinstance(figure := getattr(figures, f.name), Figure) and not figure.is_unknown
    }


def truth_table(truth: ValueTruth) -> dict[str, Any]:
    """Figures with their intervals, the table by position and this rank's points, for JSON.

    An interval without limits is null.
    """
    return {
        "num_tokens": truth.num_tokens,
        "outcomes": truth.outcomes,
        "figures": {
            name: [x if math.isfinite(x) else None for x in figure]
            for name, figure in known_figures(truth.figures).items()
        },
        "mistakes": asdict(truth.figures.mistakes),
        "by_position": truth.figures.by_position,
        "points": [asdict(point) for point in truth.points],
    }
