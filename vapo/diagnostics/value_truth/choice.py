"""Choose the states of a rollout batch whose true values are measured, within a budget of
tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, zip_longest
from random import Random

from transformers import PreTrainedTokenizerBase

from vapo.config.values import ValueTruthConfig
from vapo.rollouts.continuations import Place, group_by_state
from vapo.rollouts.segments import open_places, step_starts
from vapo.types import Rollout


@dataclass(frozen=True)
class Choice:
    """The states of a rollout batch to be measured, each a response and a number of its tokens.

    Attributes:
        places: the states.
        is_of_steps: for each state, whether its response is measured at every one of its steps.
        num_responses: the number of responses that are measured at every step.
    """

    places: list[Place]
    is_of_steps: list[bool]
    num_responses: int

    def describe(
        self, rollouts: Sequence[Rollout], settings: ValueTruthConfig, max_response_tokens: int
    ) -> str:
        """Return a line on what will be sampled, and about how many tokens it costs."""
        k, states = settings.num_continuations, group_by_state(rollouts, self.places)
        num_others = len(self.places) - sum(self.is_of_steps)
        expected = expected_tokens(rollouts, self.places, k)
        at_most = sum(k * (max_response_tokens - place.num_tokens) for place, *_ in states)
        return (
            f"value truth: {self.num_responses} responses at their steps and "
            f"{num_others} other prefixes, {len(states):,} different ones x {k} continuations; "
            f"about {expected:,} tokens, at most {at_most:,}"
        )


def choose_places(
    rollouts: Sequence[Rollout],
    settings: ValueTruthConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
) -> Choice:
    """Choose the states from which responses are sampled anew, to measure the states' true values.

    A state is a prompt with the first tokens of its response. `settings.num_responses` responses,
    of as many prompts as possible, are measured where each of their steps begins. The others are
    measured at `settings.num_prefixes` single states, spread over all positions. In an episode of
    an environment, only the beginnings of turns are chosen.

    If `expected_tokens` exceeds `settings.max_tokens`, both are cut in proportion. At least one
    response remains, or one single state if no responses are asked for. Responses whose environment
    failed are left out, and the choice is empty if there are no others.
    """
    order = [row for row in spread_over_prompts(rollouts, seed) if not rollouts[row].is_lost]
    if not order:
        return Choice([], [], 0)
    whole, rest = order[: settings.num_responses], order[settings.num_responses :]
    rng, num = Random(seed), settings.num_prefixes
    prefixes = [
        Place(row, _tokens_before(rollouts[row], (i + rng.random()) / num))
        for i, row in zip(range(num), cycle(rest), strict=False)
    ]
    rng.shuffle(prefixes)  # so that a cut list, too, is spread over the positions
    steps = [
        [Place(row, n) for n in step_starts(rollouts[row], settings.segments, tokenizer)]
        for row in whole
    ]
    size = max(len(steps), len(prefixes))

    def cut(number: int) -> tuple[list[list[Place]], list[Place]]:
        """Return `number` items of the longer list, and as large a part of the other one."""
        num_whole, num_single = len(steps) * number // size, len(prefixes) * number // size
        return steps[: max(num_whole, 1)], prefixes[: max(num_single, 0 if steps else 1)]

    def cost(number: int) -> int:
        some_steps, some_prefixes = cut(number)
        some_places = [*chain(*some_steps), *some_prefixes]
        return expected_tokens(rollouts, some_places, settings.num_continuations)

    number = size
    if settings.max_tokens is not None:
        number = max(bisect_right(range(size + 1), settings.max_tokens, key=cost) - 1, 0)
    steps, prefixes = cut(number)
    places = [*chain(*steps), *prefixes]
    num_of_steps = len(places) - len(prefixes)
    return Choice(places, [i < num_of_steps for i in range(len(places))], len(steps))


def _tokens_before(rollout: Rollout, share: float) -> int:
    """Return how many tokens come before a position in the response, given as a share from 0 to 1.

    In an episode it is a share of its turns, and the position is the beginning of a turn.
    """
    places = open_places(rollout)
    return places[min(int(share * len(places)), len(places) - 1)]


def spread_over_prompts(rollouts: Sequence[Rollout], seed: int) -> list[int]:
    """Return all rows in random order: a row of every prompt, then a second of each, and so on."""
    rng = Random(seed)
    groups = group_by_state(rollouts, [Place(row, 0) for row in range(len(rollouts))])
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    places = chain.from_iterable(zip_longest(*groups))
    return [place.row for place in places if place is not None]


def expected_tokens(rollouts: Sequence[Rollout], places: Sequence[Place], k: int) -> int:
    """Return the number of tokens that k continuations from each state would sample.

    Each continuation is taken to be as long as the remaining response, of which only the policy's
    tokens count. Equal states count once, with the last one's response.

    Args:
        places: the states, each a response and a number of its tokens.
    """
    lasts = [last for *_, last in group_by_state(rollouts, places)]
    return sum(k * sum(rollouts[last.row].is_sampled[last.num_tokens :]) for last in lasts)
