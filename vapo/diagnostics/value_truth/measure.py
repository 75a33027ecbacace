"""Measure the true values of states of a rollout batch, and compare the critic's values with
them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
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
from vapo.diagnostics.value_truth.figures import TruthFigures, truth_figures
from vapo.diagnostics.value_truth.points import Outcomes, TruthPoint
from vapo.errors import UserError
from vapo.functional.baselines import mean_of_others
from vapo.intervals import Figure
from vapo.prompts.generators import call_beside_generator, functions_beside_generators, name_of
from vapo.rollouts.continuations import ContinuationSampler
from vapo.rollouts.engines.contract import sampled_text
from vapo.system.distributed import gather_objects, sum_over_ranks, world_size
from vapo.types import Prompt, Rollout, RolloutBatch


@dataclass(frozen=True)
class ValueTruth:
    """The measured true values of a rollout batch, with the critic's values there.

    Attributes:
        points: the measured states of this rank's batch.
        figures: how the values compare, over all ranks.
        outcomes: the two possible returns; None if there are others.
        num_tokens: how many tokens the continuations have, over all ranks.
    """

    points: Sequence[TruthPoint]
    figures: TruthFigures
    outcomes: Outcomes = None
    num_tokens: int = 0

    @property
    def rows(self) -> frozenset[int]:
        """The rows that were continued from every step; without such rows, all that have a
        point.
        """
        of_steps = frozenset(point.row for point in self.points if point.is_of_steps)
        return of_steps or frozenset(point.row for point in self.points)

    def on_rows(self, rows: Sequence[int]) -> ValueTruth:
        """Return the measurement for a batch that has only these rows of this one."""
        return replace(self, points=on_rows(self.points, rows))


def measure_truth(
    batch: RolloutBatch,
    continuation_sampler: ContinuationSampler,
    *,
    seed: int,
    note: Callable[[str], None],
    groups_are_chosen: bool = False,
) -> tuple[list[TruthPoint], int]:
    """Sample continuations from some states of the batch, which measure the states' true values.

    Return the measured states, which have no critic's values yet, and the number of sampled tokens.
    A state is left out if the environment failed in one of its continuations. Every rank must call
    this, with its own batch, and measures its share of the config's numbers, rounded up.

    Args:
        note: called with a line about the cost before sampling begins, and with one about failures.
        groups_are_chosen: whether groups are filtered by their rewards (dynamic sampling). If so,
            the mean reward of a prompt's other responses does not estimate its value, and points
            have no baseline.
    """
    config = continuation_sampler.config
    truth, max_response_tokens = (
        config.value_truth,
        continuation_sampler.settings.max_response_tokens,
    )
    for name in ("num_responses", "num_prefixes", "max_tokens"):  # the ranks share these numbers
        if (number := getattr(truth, name)) is not None:
            truth = replace(truth, **{name: -(-number // world_size())})
    rollouts, tokenizer = batch.rollouts, continuation_sampler.player.tokenizer
    choice = choose_places(rollouts, truth, tokenizer, seed=seed)
    note(choice.describe(rollouts, truth, max_response_tokens))
    continuations = continuation_sampler.sample(
        rollouts, choice.places, num_continuations=truth.num_continuations, seed=seed
    )
    gamma = resolve(config).gamma
    rewards = critic_rewards(continuations.batch, config)
    measured = continuations.measured(rewards, gamma=gamma)
    baselines: list[float | None] = [None] * len(batch)
    if not groups_are_chosen:
        baselines = other_means(batch, critic_rewards(batch, config))
    marks = functions_beside_generators(config.data, "marks_step_wrong")
    points = [
        TruthPoint(
            **asdict(measured[place]),
            prompt_id=prompt_label(rollouts[place.row].prompt),
            length=len(rollouts[place.row].response_ids),
            baseline=baselines[place.row],
            is_of_steps=is_of_steps,
            is_marked=is_marked_wrong(marks, rollouts[place.row], place.num_tokens, tokenizer),
        )
        for place, is_of_steps in zip(choice.places, choice.is_of_steps, strict=True)
        if place in measured
    ]
    if len(points) < len(choice.places):
        note(
            f"value truth: {len(choice.places) - len(points)} prefixes are left out, because the "
            "environment failed in a continuation"
        )
    return points, continuations.num_sampled_tokens


def is_marked_wrong(
    marks: Mapping[str, Callable[[str], bool | None]],
    rollout: Rollout,
    num_tokens: int,
    tokenizer: PreTrainedTokenizerBase,
) -> bool | None:
    """Whether the response itself marks the step as wrong that ends after `num_tokens` tokens.

    None if no check ends there, the task has no checks, or the policy did not sample all tokens of
    the rollout.

    Args:
        marks: the `marks_step_wrong` of each source's generator, by the source's name.

    Raises: UserError: the function raises, or returns something else.
    """
    function = marks.get(rollout.prompt.source)
    if function is None or not all(rollout.is_sampled):
        return None
    text = sampled_text(rollout.response_ids[:num_tokens], tokenizer)
    mark: bool | None = call_beside_generator(function, text)
    if mark is not None and not isinstance(mark, bool):
        raise UserError(f"{name_of(function)} must return True, False or None, not {mark!r:.80}")
    return mark


def prompt_label(prompt: Prompt) -> str:
    """Return a label with the prompt's source (if it is in a mixture), id and a hash of its tokens.

    The id alone may belong to several prompts.
    """
    number = zlib.crc32(repr(prompt.prompt_ids).encode())
    return f"{prompt.source}{' ' * bool(prompt.source)}{prompt.prompt_id} ({number:08x})"


def other_means(batch: RolloutBatch, rewards: Float[Tensor, " B"]) -> list[float | None]:
    """Return for each response the mean reward of the other responses to its prompt.

    It is None without other responses, or if the environment lost any response of the group.
    """
    size = batch.group_size
    if size == 1:
        return [None] * len(batch)
    means = mean_of_others(rewards.double(), group_size=size).tolist()
    is_whole = ~batch.is_lost.view(-1, size).any(dim=1).repeat_interleave(size)
    return [m if whole else None for m, whole in zip(means, is_whole.tolist(), strict=True)]


def on_rows(points: Sequence[TruthPoint], rows: Sequence[int]) -> list[TruthPoint]:
    """Return the measured states of these rows, numbered for a batch that has only these rows."""
    numbers = {row: number for number, row in enumerate(rows)}
    return [replace(point, row=numbers[point.row]) for point in points if point.row in numbers]


def with_values(
    points: Sequence[TruthPoint], values: Float[Tensor, "B T"] | None
) -> list[TruthPoint]:
    """Return the measured states with the critic's values of them.

    States whose value is not finite are dropped. If `values` is None, all stay as they are.
    """
    if values is None:
        return list(points)
    valued = [replace(p, value=float(values[p.row, p.num_tokens])) for p in points]
    return [point for point in valued if point.value is not None and math.isfinite(point.value)]


def possible_outcomes(config: FitConfig) -> Outcomes:
    """Return the two possible returns, the worse first; None if a return may be another number."""
    plain = gives_configured_rewards(config) and config.algorithm.gamma == 1
    return reward_range(config) if plain and not critic_is_punished(config) else None


def compare_with_values(
    points: Sequence[TruthPoint],
    num_tokens: int,
    values: Float[Tensor, "B T"] | None,
    config: FitConfig,
    *,
    seed: int,
) -> ValueTruth | None:
    """Compare the critic's values with the measured true values of states.

    Every rank must call this. The result is None if no rank has a state whose value is finite.

    Args:
        points: the states that this rank measured, without the critic's values.
        num_tokens: how many tokens this rank sampled for them.
        values: the critic's values of this rank's batch; None without a critic.
        seed: for the bootstrap.
    """
    valued, outcomes = with_values(points, values), possible_outcomes(config)
    first_row, all_points = 0, []
    for rank_points in gather_objects(valued):  # rows are numbered anew over all ranks
        all_points += [replace(point, row=first_row + point.row) for point in rank_points]
        first_row += 1 + max((point.row for point in rank_points), default=0)
    total = sum_over_ranks(torch.tensor(num_tokens))
    if not all_points:
        return None
    figures = truth_figures(all_points, outcomes=outcomes, seed=seed)
    return ValueTruth(valued, figures, outcomes, int(total))


def describe_truth(figures: TruthFigures) -> str:
    """Return a line with the number of mistakes, and one for each figure that is known.

    A figure's line has its interval, or says that it has none.
    """
    rows = [f"truth/num_mistakes: {figures.num_mistakes}"]
    for name, x in known_figures(figures).items():
        limits = f"[{x.low:.4f}, {x.high:.4f}]" if x.is_bounded else "no interval"
        rows.append(f"truth/{name}: {x.value:.4f} {limits}")
    return "\n".join(rows)


def truth_metrics(truth: ValueTruth) -> dict[str, float]:
    """Return the measurement as metrics, name -> value (docs/metrics.md).

    A chart shows no interval, so figures that are unknown or have no limits are left out.
    """
    figures = truth.figures
    names = ("num_prefixes", "num_responses", "num_mistakes")
    metrics = {f"truth/{name}": float(getattr(figures, name)) for name in names}
    metrics["truth/num_continuation_tokens"] = float(truth.num_tokens)
    by_name = known_figures(figures).items()
    return metrics | {f"truth/{name}": x.value for name, x in by_name if x.is_bounded}


def known_figures(figures: TruthFigures) -> dict[str, Figure]:
    """Return name -> figure, for the figures that could be estimated."""
    return {
        f.name: figure
        for f in fields(figures)
        if isinstance(figure := getattr(figures, f.name), Figure) and not figure.is_unknown
    }


def truth_table(truth: ValueTruth) -> dict[str, Any]:
    """Return a measurement for JSON: figures with intervals, means by position, this rank's points.

    An infinite limit of an interval is null. Figures that are unknown are left out.
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
