"""Advantages from a critic that knows the task of worked sums, as an estimator of one's own.

    python experiments/smollm2/compare.py experiments/smollm2/group_sizes.yaml \
      --rows "An oracle, groups of 1"

It bounds what any critic could be worth: it sees which token makes a sum wrong, and how many steps
are left in which the policy can still go wrong. No critic of a run has that knowledge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from vapo.advantages.estimators import Estimate
from vapo.config import Hyperparameters
from vapo.diagnostics.oracle import states_before_tokens
from vapo.functional.advantages import gae
from vapo.networks.loading import load_tokenizer
from vapo.tasks.worked_sums import oracle_states
from vapo.types import EvaluatedBatch

STEP, ANSWER, RIGHT, WRONG = "whole step", "answer on", "right", "wrong"
Counts = Counter[tuple[str, bool]]  # by part of a response, and whether it went on to be right


class Place(NamedTuple):
    """The part of a response in which a token stands, and the number of steps left."""

    part: str
    steps_left: int


def estimate(
    batch: EvaluatedBatch,
    token_rewards: torch.Tensor,
    hyperparameters: Hyperparameters,
    *,
    tokenizer: str,
) -> Estimate:
    """Give each token the change of the oracle's value: GAE with lambda 0.

    Args:
        tokenizer: the folder of the policy's tokenizer.
    """
    states_of_rows = [
        states_before_tokens(oracle_states, rollout, _tokenizer(tokenizer)) or ()
        for rollout in batch.rollouts
    ]
    values = torch.zeros_like(token_rewards)
    chances = oracle_chances(states_of_rows, batch.is_correct.tolist())
    for row, row_chances in enumerate(chances):
        # a reward of +1 or -1
        values[row, batch.response_mask[row]] = 2 * torch.tensor(row_chances) - 1
    columns = (token_rewards, values, batch.response_mask)
    return Estimate(gae(*columns, gamma=hyperparameters.gamma, lambda_=0.0))


def oracle_chances(
    states_of_rows: Sequence[Sequence[str]], is_correct: Sequence[bool]
) -> list[list[float]]:
    """Return the chance of a right answer before each token of each response.

    How often the policy gets each part of a step right is counted over the other responses, so no
    response has a say in its own values.

    >>> right, slip = ["1 on sum", "answer on"], ["1 on sum", "answer off 0"]
    >>> # Of the two others one gets its sum right and one its answer. With half a count added to
    >>> # either side these are chances of 1.5 / 3 and 1.5 / 2, and of 0.375 for both.
    >>> oracle_chances([right, right, slip], [True, True, False])[0]
    [0.375, 0.75]
    """
    places_of_rows = [[_place(state) for state in states] for states in states_of_rows]
    counts_of_rows = [
        _counts(places, correct) for places, correct in zip(places_of_rows, is_correct, strict=True)
    ]
    total: Counts = Counter()
    for counts in counts_of_rows:
        total.update(counts)
    chances_of_rows = []
    for places, counts in zip(places_of_rows, counts_of_rows, strict=True):
        others = total.copy()
        others.subtract(counts)
        chances_of_rows.append([_chance(place, others) for place in places])
    return chances_of_rows


def _place(state: str) -> Place:
    if state in (ANSWER, RIGHT):
        return Place(state, 0)
    words = state.split()
    is_on = len(words) == 3 and words[1] == "on"
    return Place(words[2], int(words[0])) if is_on else Place(WRONG, -1)


def _counts(places: Sequence[Place], correct: bool) -> Counts:
    begun = {place.steps_left for place in places if place.part != WRONG}
    counts: Counts = Counter(
        (place.part, place.steps_left - 1 in begun if place.steps_left > 0 else correct)
        for place in places
    )
    counts.update((STEP, steps_left - 1 in begun) for steps_left in begun if steps_left > 0)
    return counts


def _chance(place: Place, counts: Counts) -> float:
    chance = _share(place.part, counts)
    if place.steps_left > 0:
        chance *= _share(STEP, counts) ** (place.steps_left - 1) * _share(ANSWER, counts)
    return chance


def _share(part: str, counts: Counts) -> float:
    return (counts[part, True] + 0.5) / (counts[part, True] + counts[part, False] + 1)


@cache
def _tokenizer(folder: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(folder)
