"""Choose the rollouts that a page shows: groups that differ, with right and wrong responses."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.types import TrainingBatch


@dataclass(frozen=True)
class ChosenGroup:
    """`num_tokens`: rows of the batch, each with how many of its first tokens are shown."""

    index: int
    reason: str
    num_tokens: dict[int, int]


def choose_groups(
    batch: TrainingBatch,
    value_errors: Float[Tensor, "B T"] | None,
    *,
    num_groups: int,
    max_responses: int,
    max_tokens: int,
    seed: int,
    measured: Collection[int] = (),
) -> list[ChosenGroup]:
    """Choose one group for each reason, then others at random by `seed`, deterministically.

    The groups share `max_tokens` evenly; later groups get what an earlier one does not use. As
    long as there are groups with a row in `measured`, no other is chosen, and such rows are shown
    before others.
    """
    reasons = group_scores(batch, value_errors)
    total = len(batch) // batch.group_size
    with_truth = {row // batch.group_size for row in measured}
    chosen: dict[int, str] = {}

    def left() -> list[int]:
        """Those that are not chosen yet; of these the ones whose truth is known, if there are."""
        others = [group for group in range(total) if group not in chosen]
        return [group for group in others if group in with_truth] or others

    for reason, scores in reasons.items():
        found = [group for group in left() if scores[group] > 0]
        if found and len(chosen) < num_groups:
            chosen[max(found, key=lambda group: (scores[group], -group))] = reason
    draw = random.Random(seed)
    while len(chosen) < num_groups and (others := left()):
        for group in draw.sample(others, min(len(others), num_groups - len(chosen))):
            chosen[group] = "at random"
    groups, budget = [], max_tokens
    for place, (group, reason) in enumerate(chosen.items()):
        rows = range(group * batch.group_size, (group + 1) * batch.group_size)
        shown = choose_rows(
            rows,
            is_correct=batch.is_correct[rows.start : rows.stop].tolist(),
            lengths=batch.response_lengths[rows.start : rows.stop].tolist(),
            max_responses=max_responses,
            max_tokens=budget // (len(chosen) - place),
            measured=measured,
        )
        budget -= sum(shown.values())
        groups.append(ChosenGroup(group, reason, shown))
    return [group for group in groups if group.num_tokens]


def group_scores(
    batch: TrainingBatch, value_errors: Float[Tensor, "B T"] | None
) -> dict[str, list[float]]:
    """Score each group for each reason: the highest is shown, none at or below 0."""

    def token_means(x: Tensor) -> Tensor:
        kept = torch.where(batch.response_mask, x.double().abs(), 0.0)
        return by_group(kept.sum(dim=1)) / by_group(batch.response_lengths.double())

    def by_group(x: Tensor) -> Tensor:
        return x.view(-1, batch.group_size).sum(dim=1)

    share = by_group(batch.is_correct.double()) / batch.group_size
    mixed = torch.minimum(share, 1 - share)
    longest = batch.response_lengths.double().view(-1, batch.group_size).amax(dim=1)
    scores: dict[str, Tensor] = {}
    if value_errors is not None:
        error = token_means(value_errors)
        scores["largest value error"] = error
        mixed = torch.where(mixed > 0, mixed + 1e-6 * error, 0.0)  # ties: the larger value error
    scores["right and wrong answers"] = mixed
    if batch.advantages is not None:
        scores["largest advantages"] = token_means(batch.advantages)
    scores["longest response"] = longest
    if value_errors is not None:
        scores["smallest value error"] = 1 / (1 + error)
    return {reason: score.tolist() for reason, score in scores.items()}


def choose_rows(
    rows: Sequence[int],
    *,
    is_correct: Sequence[bool],
    lengths: Sequence[int],
    max_responses: int,
    max_tokens: int,
    measured: Collection[int] = (),
) -> dict[int, int]:
    """Choose rows and how many tokens of each are shown: right and wrong ones alternate.

    Those in `measured` come before others. Where none fits, the shortest is cut to the budget.
    """
    right = [i for i in range(len(rows)) if is_correct[i]]
    wrong = [i for i in range(len(rows)) if not is_correct[i]]
    by_turns = [i for i in chain.from_iterable(zip_longest(right, wrong)) if i is not None]
    by_turns.sort(key=lambda i: rows[i] not in measured)  # keeps the turns
    shown: dict[int, int] = {}
    for i in by_turns:
        if len(shown) < max_responses and lengths[i] <= max_tokens - sum(shown.values()):
            shown[rows[i]] = lengths[i]
    if not shown and max_tokens > 0:
        shortest = min(by_turns, key=lambda i: lengths[i])
        shown[rows[shortest]] = max_tokens
    return dict(sorted(shown.items()))
