"""Choose prefixes of a rollout batch, sample on from them, and keep what they earned."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from random import Random

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.advantages.token_rewards import critic_rewards
from vapo.advantages.value_loss_columns import reward_range
from vapo.config import FitConfig, resolve
from vapo.config.critic_rules import gives_configured_rewards
from vapo.config.value_truth import ValueTruthConfig
from vapo.diagnostics.value_truth.figures import TruthFigures, truth_figures
from vapo.diagnostics.value_truth.points import Figure, TruthPoint
from vapo.rewards.scorer import Scorer
from vapo.rollouts.continuations import Prefix, continue_responses
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.sampling_ahead import Stage
from vapo.rollouts.segments import step_starts
from vapo.system.distributed import sum_over_ranks, world_size
from vapo.types import Rollout, RolloutBatch


@dataclass(frozen=True)
class ValueTruth:
    """A measurement: this rank's points, of rows of its batch, and the figures of all ranks'."""

    points: list[TruthPoint]
    figures: TruthFigures
    num_tokens: int
    outcomes: tuple[float, float] | None


@dataclass(frozen=True)
class Choice:
    """The prefixes to measure; `of_steps` says of each whether its response has all its steps."""

    prefixes: list[Prefix]
    of_steps: list[bool]
    num_responses: int

    def describe(self, rollouts: Sequence[Rollout], settings: ValueTruthConfig, most: int) -> str:
        """What is to be sampled, before it is."""
        k, starts = settings.num_continuations, distinct(rollouts, self.prefixes)
        num_others = len(self.prefixes) - sum(self.of_steps)
        expected = expected_tokens(rollouts, self.prefixes, k)
        at_most = sum(k * (most - p.num_tokens) for p in starts)
        return (
            f"value truth: {self.num_responses} responses at their steps and "
            f"{num_others} other prefixes, {len(starts):,} different ones x {k} continuations; "
            f"about {expected:,} tokens, at most {at_most:,}"
        )


def choose_prefixes(
    rollouts: Sequence[Rollout],
    settings: ValueTruthConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    most: int,
    seed: int,
) -> Choice:
    """Whole responses, of as many prompts as there are, and prefixes of others at all positions.

    Fewer of both where they would sample more than `settings.max_tokens`, by the tokens that the
    responses themselves had left. `most` is the budget of a response.
    """
    order = spread_over_prompts(rollouts, seed)
    whole = order[: settings.num_responses]
    others = order[len(whole) :] or order
    rng = Random(seed)
    num = settings.num_prefixes if others else 0
    drawn: list[Prefix] = []
    for i in range(num):
        row = others[i % len(others)]
        length = len(rollouts[row].response_ids)
        drawn.append(Prefix(row, min(int((i + rng.random()) / num * length), length - 1)))
    rng.shuffle(drawn)  # so that fewer of them are spread over the positions too
    steps = [
        [Prefix(row, n) for n in step_starts(rollouts[row], settings.segments, tokenizer)]
        for row in whole
    ]
    if settings.max_tokens is not None:
        asked = [*(prefix for row in steps for prefix in row), *drawn]
        expected = expected_tokens(rollouts, asked, settings.num_continuations)
        share = min(1.0, settings.max_tokens / max(expected, 1))
        drawn = drawn[: math.floor(len(drawn) * share)]
        least = 0 if drawn else 1  # a rank without a prefix would leave the others waiting
        steps = steps[: max(math.floor(len(steps) * share), least)]
    pairs = [(prefix, True) for row in steps for prefix in row] + [(p, False) for p in drawn]
    pairs = [(p, is_step) for p, is_step in pairs if p.num_tokens < most]
    return Choice([p for p, _ in pairs], [is_step for _, is_step in pairs], len(steps))


def spread_over_prompts(rollouts: Sequence[Rollout], seed: int) -> list[int]:
    """All rows, shuffled: first one of every prompt, then another one of each, and so on."""
    by_prompt: dict[str, list[int]] = defaultdict(list)
    for row, rollout in enumerate(rollouts):
        by_prompt[rollout.prompt.prompt_id].append(row)
    rng, groups = Random(seed), list(by_prompt.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    rounds = max(map(len, groups), default=0)
    return [group[i] for i in range(rounds) for group in groups if i < len(group)]


def expected_tokens(rollouts: Sequence[Rollout], prefixes: Sequence[Prefix], k: int) -> int:
    """What the continuations would sample if each were as long as what the response had left."""
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    return sum(k * (lengths[p.row] - p.num_tokens) for p in distinct(rollouts, prefixes))


def distinct(rollouts: Sequence[Rollout], prefixes: Sequence[Prefix]) -> list[Prefix]:
    """One of those with equal prompts and tokens, which share their continuations."""
    return list(
        {
            (rollouts[p.row].prompt.prompt_id, rollouts[p.row].response_ids[: p.num_tokens]): p
            for p in prefixes
        }.values()
    )


def measure(
    batch: RolloutBatch,
    config: FitConfig,
    *,
    settings: SamplingSettings,
    sampler: Sampler,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    stage: Stage,
    note: Callable[[str], None],
) -> tuple[list[TruthPoint], int]:
    """Sample on from prefixes of the batch; the points, without values, and the tokens sampled.

    Says what it costs before it begins. Every rank must call this, with its own batch.
    """
    truth, most = config.value_truth, settings.max_response_tokens
    if world_size() > 1:
        share = {
            name: -(-number // world_size())
            for name in ("num_responses", "num_prefixes", "max_tokens")
            if (number := getattr(truth, name)) is not None
        }
        truth = replace(truth, **share)
    choice = choose_prefixes(batch.rollouts, truth, tokenizer, most=most, seed=seed)
    note(choice.describe(batch.rollouts, truth, most))
    found = continue_responses(
        batch.rollouts,
        choice.prefixes,
        num_continuations=truth.num_continuations,
        config=config,
        settings=settings,
        sampler=sampler,
        scorer=scorer,
        tokenizer=tokenizer,
        seed=seed,
        stage=stage,
    )
    gamma = resolve(config).gamma
    returns = found.returns(critic_rewards(found.batch, config), gamma=gamma).tolist()
    baselines = other_means(batch, critic_rewards(batch, config))
    points = [
        TruthPoint(
            prompt_id=batch.rollouts[prefix.row].prompt.prompt_id,
            row=prefix.row,
            num_tokens=prefix.num_tokens,
            length=len(batch.rollouts[prefix.row].response_ids),
            returns=tuple(row),
            baseline=baselines[prefix.row],
            is_of_steps=is_step,
        )
        for prefix, is_step, row in zip(choice.prefixes, choice.of_steps, returns, strict=True)
    ]
    return points, found.num_sampled_tokens


def other_means(batch: RolloutBatch, rewards: Float[Tensor, " B"]) -> list[float | None]:
    """For each response the mean reward of the others to its prompt; None where there are none."""
    size = batch.group_size
    if size == 1:
        return [None] * len(batch)
    groups = rewards.double().view(-1, size)
    means = (groups.sum(dim=1, keepdim=True) - groups) / (size - 1)
    return [float(mean) for mean in means.flatten()]


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
    is_punished = config.rewards.overlong.soft_punishment and config.critic.reward == "shaped"
    plain = gives_configured_rewards(config) and config.algorithm.gamma == 1
    return reward_range(config) if plain and not is_punished else None


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
    seed: int,
) -> ValueTruth | None:
    """The critic's values beside what was measured; None where nothing could be.

    Every rank must call this.
    """
    own = with_values(points, values)
    everything, outcomes = of_all_ranks(own), outcomes_of(config)
    total = sum_over_ranks(torch.tensor(num_tokens))
    if not everything:
        return None
    figures = truth_figures(everything, outcomes=outcomes, seed=seed)
    return ValueTruth(own, figures, int(total), outcomes)


def describe_truth(figures: TruthFigures) -> str:
    """A line a figure, with its interval; those that are not known are left out."""
    found = {f.name: getattr(figures, f.name) for f in fields(figures)}
    rows = [
        f"truth/{name}: {x.value:.4f} [{x.low:.4f}, {x.high:.4f}]"
        for name, x in found.items()
        if isinstance(x, Figure) and math.isfinite(x.value)
    ]
    return "\n".join(rows)


def truth_metrics(truth: ValueTruth) -> dict[str, float]:
    """The figures as metrics (docs/metrics.md); those that are not known are left out."""
    figures = truth.figures
    metrics = {
        "truth/num_prefixes": float(figures.num_prefixes),
        "truth/num_responses": float(figures.num_responses),
        "truth/num_tokens": float(truth.num_tokens),
    }
    for field in fields(figures):
        found = getattr(figures, field.name)
        if not isinstance(found, Figure) or not math.isfinite(found.value):
            continue
        ends = {"": found.value, "_ci_low": found.low, "_ci_high": found.high}
        metrics |= {
            f"truth/{field.name}{end}": value for end, value in ends.items() if math.isfinite(value)
        }
    return metrics
