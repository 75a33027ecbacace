"""Sample on from prefixes of a rollout batch, and keep what they earned beside the critic."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from vapo.advantages.token_rewards import critic_rewards
from vapo.advantages.value_loss_columns import reward_range
from vapo.config import FitConfig, resolve
from vapo.config.critic_rules import critic_is_punished, gives_configured_rewards
from vapo.diagnostics.value_truth.choice import choose_prefixes
from vapo.diagnostics.value_truth.figures import TruthFigures, truth_figures
from vapo.diagnostics.value_truth.marks import own_mark
from vapo.diagnostics.value_truth.points import Figure, TruthPoint
from vapo.functional.baselines import leave_one_out_advantages
from vapo.rollouts.continuations import Continuer
from vapo.system.distributed import sum_over_ranks, world_size
from vapo.types import Prompt, Rollout, RolloutBatch


@dataclass(frozen=True)
class ValueTruth:
    """A measurement: this rank's points, of rows of its `rollouts`, and all ranks' figures."""

    points: list[TruthPoint]
    rollouts: Sequence[Rollout]
    figures: TruthFigures
    num_tokens: int
    outcomes: tuple[float, float] | None


def measure_truth(
    batch: RolloutBatch,
    continuer: Continuer,
    *,
    seed: int,
    note: Callable[[str], None],
    groups_are_chosen: bool = False,
) -> tuple[list[TruthPoint], int]:
    """Sample on from prefixes of the batch; the points, without values, and the tokens sampled.

    Says what it costs before it begins. Every rank must call this, with its own batch.

    Args:
        groups_are_chosen: by their rewards (dynamic sampling): then the mean reward of the other
            responses to a prompt is no estimate of its value, and points have no baseline.
    """
    config = continuer.config
    truth, most = config.value_truth, continuer.settings.max_response_tokens
    if world_size() > 1:
        share = {
            name: -(-number // world_size())
            for name in ("num_responses", "num_prefixes", "max_tokens")
            if (number := getattr(truth, name)) is not None
        }
        truth = replace(truth, **share)
    choice = choose_prefixes(batch.rollouts, truth, continuer.player.tokenizer, seed=seed)
    note(choice.describe(batch.rollouts, truth, most))
    found = continuer.sample(
        batch.rollouts, choice.prefixes, num_continuations=truth.num_continuations, seed=seed
    )
    gamma = resolve(config).gamma
    returns = found.returns(critic_rewards(found.batch, config), gamma=gamma).tolist()
    baselines: list[float | None] = [None] * len(batch)
    if not groups_are_chosen:
        baselines = other_means(batch, critic_rewards(batch, config))
    points = [
        TruthPoint(
            prompt_id=label_of(batch.rollouts[prefix.row].prompt),
            row=prefix.row,
            num_tokens=prefix.num_tokens,
            length=len(batch.rollouts[prefix.row].response_ids),
            returns=tuple(row),
            baseline=baselines[prefix.row],
            is_of_steps=is_step,
            is_marked=own_mark(
                config, batch.rollouts[prefix.row], prefix.num_tokens, continuer.player.tokenizer
            ),
        )
        for prefix, is_step, row, is_whole in zip(
            choice.prefixes, choice.of_steps, returns, found.are_whole, strict=True
        )
        if is_whole
    ]
    if len(points) < len(choice.prefixes):
        note(
            f"value truth: {len(choice.prefixes) - len(points)} prefixes are left out, because the "
            "environment failed in a continuation"
        )
    return points, found.num_sampled_tokens


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
    own = rewards.double()
    means = (own - leave_one_out_advantages(own, group_size=size)).tolist()
    is_whole = ~batch.is_failed.view(-1, size).any(dim=1).repeat_interleave(size)
    return [m if whole else None for m, whole in zip(means, is_whole.tolist(), strict=True)]


def on_rows_of(
    points: Sequence[TruthPoint], rollouts: Sequence[Rollout], batch: RolloutBatch
) -> list[TruthPoint]:
    """The points of rows of `rollouts` on the rows of a batch that has some of them."""
    rows = {id(rollout): row for row, rollout in enumerate(batch.rollouts)}
    places = [rows.get(id(rollouts[point.row])) for point in points]
    return [
        replace(point, row=place)
        for point, place in zip(points, places, strict=True)
        if place is not None
    ]


def with_values(
    points: Sequence[TruthPoint], values: Float[Tensor, "B T"] | None
) -> list[TruthPoint]:
    """The points with the critic's values of their states; those that are not finite are left
    out."""
    if values is None:
        return list(points)
    found = [replace(p, value=float(values[p.row, p.num_tokens])) for p in points]
    return [point for point in found if point.value is not None and math.isfinite(point.value)]


def outcomes_of(config: FitConfig) -> tuple[float, float] | None:
    """The two returns that there are; None where there are others in between."""
    plain = gives_configured_rewards(config) and config.algorithm.gamma == 1
    return reward_range(config) if plain and not critic_is_punished(config) else None


def of_all_ranks(points: Sequence[TruthPoint]) -> list[TruthPoint]:
    """The points of every rank, in the order of the ranks. Every rank must call this."""
    if world_size() == 1:
        return list(points)
    gathered: list[list[TruthPoint]] = [[] for _ in range(world_size())]
    dist.all_gather_object(gathered, list(points))
    first, found = 0, []
    for own in gathered:  # a row of one rank is not that of another
        found += [replace(point, row=first + point.row) for point in own]
        first += 1 + max((point.row for point in own), default=0)
    return found


def beside_values(
    points: Sequence[TruthPoint],
    num_tokens: int,
    values: Float[Tensor, "B T"] | None,
    config: FitConfig,
    *,
    rollouts: Sequence[Rollout],
    seed: int,
) -> ValueTruth | None:
    """The critic's values beside what was measured; None where nothing could be.

    Points and values are of the rows of `rollouts`.

    Every rank must call this.
    """
    own = with_values(points, values)
    everything, outcomes = of_all_ranks(own), outcomes_of(config)
    total = sum_over_ranks(torch.tensor(num_tokens))
    if not everything:
        return None
    figures = truth_figures(everything, outcomes=outcomes, seed=seed)
    return ValueTruth(own, rollouts, figures, int(total), outcomes)


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
    metrics = {
        "truth/num_prefixes": float(figures.num_prefixes),
        "truth/num_responses": float(figures.num_responses),
        "truth/num_mistakes": float(figures.num_mistakes),
        "truth/num_tokens": float(truth.num_tokens),
    }
    known = known_figures(figures).items()
    return metrics | {f"truth/{name}": x.value for name, x in known if x.is_bounded}


def known_figures(figures: TruthFigures) -> dict[str, Figure]:
    """The figures that could be estimated, by name."""
    found = {f.name: getattr(figures, f.name) for f in fields(figures)}
    return {
        name: figure
        for name, figure in found.items()
        if isinstance(figure, Figure) and math.isfinite(figure.value)
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
