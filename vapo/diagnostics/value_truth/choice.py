"""Which prefixes of a rollout batch are measured, within a budget of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from transformers import PreTrainedTokenizerBase

from vapo.config.values import ValueTruthConfig
from vapo.rollouts.continuations import Prefix, State, distinct, state_of
from vapo.rollouts.segments import step_starts, turn_starts
from vapo.types import Rollout


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
    seed: int,
) -> Choice:
    """Whole responses, of as many prompts as there are, and prefixes of others at all positions.

    Fewer of both, in proportion, where they would sample more than `settings.max_tokens` by the
    tokens that the responses themselves had left; one response, or prefix, is always measured.
    Episodes are continued from the beginnings of turns alone.
    """
    order = [row for row in spread_over_prompts(rollouts, seed) if rollouts[row].failure is None]
    if not order:
        return Choice([], [], 0)
    whole, others = order[: settings.num_responses], order[settings.num_responses :]
    rng = Random(seed)
    num = settings.num_prefixes if others else 0
    drawn: list[Prefix] = []
    for i in range(num):
        row = others[i % len(others)]
        drawn.append(Prefix(row, _place(rollouts[row], (i + rng.random()) / num)))
    rng.shuffle(drawn)  # so that fewer of them are spread over the positions too
    steps = [
        [Prefix(row, n) for n in step_starts(rollouts[row], settings.segments, tokenizer)]
        for row in whole
    ]
    size = max(len(steps), len(drawn))

    def cut(number: int) -> tuple[list[list[Prefix]], list[Prefix]]:
        """The first of each, `number` of the longer list."""
        own, single = len(steps) * number // size, len(drawn) * number // size
        return steps[: max(own, 1)], drawn[: max(single, 0 if steps else 1)]

    def cost(number: int) -> int:
        some, single = cut(number)
        asked = [*(prefix for row in some for prefix in row), *single]
        return expected_tokens(rollouts, asked, settings.num_continuations)

    kept = size
    if settings.max_tokens is not None:
        kept = max(bisect_right(range(size + 1), settings.max_tokens, key=cost) - 1, 0)
    steps, drawn = cut(kept)
    prefixes = [prefix for row in steps for prefix in row]
    is_of_steps = [True] * len(prefixes) + [False] * len(drawn)
    return Choice([*prefixes, *drawn], is_of_steps, len(steps))


def _place(rollout: Rollout, share: float) -> int:
    """The place that has this share of the response before it; in an episode the beginning of the
    turn that has this share of the turns before it."""
    places = turn_starts(rollout) if rollout.turns else range(len(rollout.response_ids))
    return places[min(int(share * len(places)), len(places) - 1)]


def spread_over_prompts(rollouts: Sequence[Rollout], seed: int) -> list[int]:
    """All rows, shuffled: first one of every prompt, then another one of each, and so on."""
    by_prompt: dict[State, list[int]] = defaultdict(list)
    for row in range(len(rollouts)):
        by_prompt[state_of(rollouts, Prefix(row, 0))].append(row)
    rng, groups = Random(seed), list(by_prompt.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    rounds = max(map(len, groups), default=0)
    return [group[i] for i in range(rounds) for group in groups if i < len(group)]


def expected_tokens(rollouts: Sequence[Rollout], prefixes: Sequence[Prefix], k: int) -> int:
    """What the continuations would sample if each were as long as what the response had left."""
    return sum(
        k * sum(rollouts[p.row].is_sampled[p.num_tokens :]) for p in distinct(rollouts, prefixes)
    )
