"""Which states of a rollout batch are measured, within a budget of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, zip_longest
from random import Random

from transformers import PreTrainedTokenizerBase

from vapo.config.values import ValueTruthConfig
from vapo.rollouts.continuations import Place, by_state
from vapo.rollouts.segments import open_places, step_starts
from vapo.types import Rollout


@dataclass(frozen=True)
class Choice:
    """The places to measure; `of_steps` says of each whether its response has all its steps."""

    places: list[Place]
    of_steps: list[bool]
    num_responses: int

    def describe(self, rollouts: Sequence[Rollout], settings: ValueTruthConfig, most: int) -> str:
        """What is to be sampled, before it is."""
        k, states = settings.num_continuations, by_state(rollouts, self.places)
        num_others = len(self.places) - sum(self.of_steps)
        expected = expected_tokens(rollouts, self.places, k)
        at_most = sum(k * (most - place.num_tokens) for place, *_ in states)
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
    """Whole responses, of as many prompts as there are, and prefixes of others at all positions.

    Fewer of both, in proportion, where they would sample more than `settings.max_tokens` by the
    tokens that the responses themselves had left; one response, or prefix, is always measured.
    Episodes are continued from the beginnings of turns alone.
    """
    order = [row for row in spread_over_prompts(rollouts, seed) if not rollouts[row].is_lost]
    if not order:
        return Choice([], [], 0)
    whole, others = order[: settings.num_responses], order[settings.num_responses :]
    rng, num = Random(seed), settings.num_prefixes
    drawn = [
        Place(row, _tokens_before(rollouts[row], (i + rng.random()) / num))
        for i, row in zip(range(num), cycle(others), strict=False)
    ]
    rng.shuffle(drawn)  # so that fewer of them are spread over the positions too
    steps = [
        [Place(row, n) for n in step_starts(rollouts[row], settings.segments, tokenizer)]
        for row in whole
    ]
    size = max(len(steps), len(drawn))

    def cut(number: int) -> tuple[list[list[Place]], list[Place]]:
        """The first of each, `number` of the longer list."""
        own, single = len(steps) * number // size, len(drawn) * number // size
        return steps[: max(own, 1)], drawn[: max(single, 0 if steps else 1)]

    def cost(number: int) -> int:
        some, single = cut(number)
        return expected_tokens(rollouts, [*chain(*some), *single], settings.num_continuations)

    kept = size
    if settings.max_tokens is not None:
        kept = max(bisect_right(range(size + 1), settings.max_tokens, key=cost) - 1, 0)
    steps, drawn = cut(kept)
    places = [*chain(*steps), *drawn]
    num_of_steps = len(places) - len(drawn)
    return Choice(places, [i < num_of_steps for i in range(len(places))], len(steps))


def _tokens_before(rollout: Rollout, share: float) -> int:
    """The number of tokens that are this share of the response; of an episode those before the turn
    that has this share of the turns before it."""
    places = open_places(rollout)
    return places[min(int(share * len(places)), len(places) - 1)]


def spread_over_prompts(rollouts: Sequence[Rollout], seed: int) -> list[int]:
    """All rows, shuffled: first one of every prompt, then another one of each, and so on."""
    rng = Random(seed)
    groups = by_state(rollouts, [Place(row, 0) for row in range(len(rollouts))])
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    places = chain.from_iterable(zip_longest(*groups))
    return [place.row for place in places if place is not None]


def expected_tokens(rollouts: Sequence[Rollout], places: Sequence[Place], k: int) -> int:
    """What the continuations would sample if each were as long as what the response had left."""
    lasts = [last for *_, last in by_state(rollouts, places)]  # of responses that share a state
    return sum(k * sum(rollouts[last.row].is_sampled[last.num_tokens :]) for last in lasts)
