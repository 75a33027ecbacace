"""Responses sampled on from the middle of others, and what their states are worth by them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.config import FitConfig
from vapo.config.estimators import VineOptions
from vapo.errors import UserError
from vapo.functional.advantages import monte_carlo_returns
from vapo.functional.columns import placed_rewards
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.episodes import REPLAY
from vapo.rollouts.player import Player
from vapo.rollouts.segments import begun_turns, step_starts
from vapo.system.distributed import sum_over_ranks
from vapo.system.progress import Stage
from vapo.types import Rollout, RolloutBatch


@dataclass(frozen=True)
class Place:
    """The state of a row behind the first `num_tokens` tokens of its response; 0: the prompt."""

    row: int
    num_tokens: int


@dataclass(frozen=True)
class MeasuredState(Place):
    """A state, and what each response that was sampled on from it earned after it.

    The same continuations are those of `num_places` places that were asked for, whose states are
    equal: the prompt alone is one of each response to it.
    """

    returns: tuple[float, ...]
    num_places: int = field(default=1, kw_only=True)

    @cached_property
    def mean(self) -> float:
        return statistics.fmean(self.returns)

    @cached_property
    def squares(self) -> float:
        """The returns' squared differences from their mean, added up."""
        return sum((x - self.mean) ** 2 for x in self.returns)

    @cached_property
    def noise(self) -> float:
        """The variance of `mean` around the true value, estimated without bias; needs K >= 2."""
        num = len(self.returns)
        return self.squares / (num - 1) / num

    @property
    def num_draws(self) -> float:
        """A place's share of the continuations, so that over all of them each counts once."""
        return len(self.returns) / self.num_places


def by_state(rollouts: Sequence[Rollout], places: Sequence[Place]) -> list[list[Place]]:
    """The places of each different state, which is all that a continuation depends on.

    Ids of prompts alone may be equal in two sources.
    """
    found: dict[Hashable, list[Place]] = defaultdict(list)
    for place in places:
        rollout = rollouts[place.row]
        prompt, ids = rollout.prompt, rollout.response_ids[: place.num_tokens]
        key = (prompt.source, prompt.prompt_id, prompt.answer, prompt.prompt_ids, ids)
        found[key].append(place)
    return list(found.values())


@dataclass(frozen=True)
class Continuations:
    """K whole responses from each different state of some places.

    `states` has the places of each state. `batch` has the continued responses, prefixes and all, a
    group of K rows a state; the engine sampled `num_sampled_tokens` of them.
    """

    states: list[list[Place]]
    batch: RolloutBatch
    num_sampled_tokens: int

    @property
    def groups(self) -> list[list[Rollout]]:
        """The continued responses of each state."""
        size, rollouts = self.batch.group_size, self.batch.rollouts
        return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]

    def measured(
        self, rewards: Float[Tensor, " SK"], *, gamma: float
    ) -> dict[Place, MeasuredState]:
        """The state at each place, with what each continuation earned after it, discounted.

            sum over rewards of gamma^(sampled tokens from the next one to the reward's)

        The rewards of earlier turns are not in it. States of which a continuation was lost to its
        environment are left out.
        """
        placed = placed_rewards(self.batch, rewards.double())
        returns = monte_carlo_returns(placed, self.batch.response_mask, gamma=gamma)
        of_states = returns.split(self.batch.group_size)
        found = {}
        for places, group, earned in zip(self.states, self.groups, of_states, strict=True):
            if any(rollout.is_lost for rollout in group):
                continue
            draws = tuple(earned[:, places[0].num_tokens].tolist())
            for place in places:
                found[place] = MeasuredState(
                    place.row, place.num_tokens, draws, num_places=len(places)
                )
        return found


@dataclass(frozen=True)
class Continuer:
    """Samples on from places of responses, and judges what comes of them as whole responses.

    A continuation has what its prefix leaves of `settings.max_response_tokens`; the overlong
    punishment is that of the training budget.

    Args:
        settings: those by which the responses were sampled.
        stage: where progress is reported.
    """

    config: FitConfig
    settings: SamplingSettings
    player: Player
    stage: Stage

    def sample(
        self,
        rollouts: Sequence[Rollout],
        places: Sequence[Place],
        *,
        num_continuations: int,
        seed: int,
    ) -> Continuations:
        """Sample `num_continuations` responses on from each place, and judge them.

        Equal states are sampled on from once. Every rank must call this, each with places of its
        own: engines gather the actor's shards.

        Raises:
            ValueError: there is no place, one is behind the response, or has no token left.
        """
        if not places:
            raise ValueError("no places: a rank that has none would leave the others waiting")
        for place in places:
            length = len(rollouts[place.row].response_ids)
            if place.num_tokens >= min(length, self.settings.max_response_tokens):
                raise ValueError(f"{place}: nothing is left to sample")
        states = by_state(rollouts, places)
        starts = [beginning_of(rollouts[first.row], first.num_tokens) for first, *_ in states]
        total = len(starts) * num_continuations
        with self.stage("continuations", total=total, unit="responses") as advance:
            whole = self.player.play(
                starts,
                group_size=num_continuations,
                settings=self.settings,
                seed=seed,
                advance=advance,
            )
        check_replayed(whole)
        batch = make_rollout_batch(
            whole,
            group_size=num_continuations,
            rewards=self.config.rewards,
            max_response_tokens=self.config.rollouts.max_response_tokens,
        )
        sampled = sum(
            sum(rollout.is_sampled[len(starts[i // num_continuations].response_ids) :])
            for i, rollout in enumerate(whole)
        )
        return Continuations(states, batch, sampled)


def beginning_of(rollout: Rollout, num_tokens: int) -> Rollout:
    """The rollout as it was after so many tokens, its last turn under way.

    Raises: ValueError: it cannot be played on from there.
    """
    return replace(
        rollout,
        response_ids=rollout.response_ids[:num_tokens],
        rollout_logprobs=rollout.rollout_logprobs[:num_tokens],
        turns=begun_turns(rollout, num_tokens),
    )


def check_replayed(rollouts: Sequence[Rollout]) -> None:
    """Raises: UserError: an environment did not come to where an episode is continued."""
    failed = [r for r in rollouts if r.is_lost and str(r.failure).startswith(REPLAY)]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(rollouts)} continuations could not begin (prompt "
            f"{failed[0].prompt.prompt_id}): {failed[0].failure}; draw numbers from "
            "random.Random(row['seed']), or switch off what continues responses (value_truth)"
        )


def with_step_values(
    batch: RolloutBatch, continuer: Continuer, *, seed: int
) -> tuple[RolloutBatch, dict[str, float]]:
    """The batch with the value of each step's start, and what the continuations cost.

        V(s) = mean reward of K continuations from s, shaped as the batch's rewards are

    The responses are continued by the settings that sampled them. Those that carry no loss are
    not: every step's value is the response's own reward, so that its advantages are 0. Every rank
    must call this, with its own rows.

    Source: VinePPO (arXiv 2410.01679). Metrics are over all ranks.
    """
    options = continuer.config.algorithm
    assert isinstance(options, VineOptions)
    tokenizer = continuer.player.tokenizer
    starts = [step_starts(one, options.vine_segments, tokenizer) for one in batch.rollouts]
    rows = batch.loss_mask.any(dim=1).nonzero().flatten().tolist()
    places = [Place(row, start) for row in rows for start in starts[row]]
    made = continuer.sample(
        batch.rollouts,
        places or [Place(0, 0)],  # an engine may gather the actor's shards: all ranks must call
        num_continuations=options.vine_continuations,
        seed=seed,
    )
    measured = made.measured(made.batch.rewards, gamma=1.0)
    is_start = torch.zeros_like(batch.response_mask)
    for row, own in enumerate(starts):
        is_start[row, own] = True
    values = batch.rewards[:, None].repeat(1, batch.response_mask.shape[1])
    for place in places:
        values[place.row, place.num_tokens :] = measured[place].mean
    values = torch.where(batch.response_mask, values, 0.0)
    batch = replace(batch, step_starts=is_start, step_values=values)
    return batch, _metrics(made, batch, int(is_start.sum()))


def _metrics(made: Continuations, batch: RolloutBatch, num_steps: int) -> dict[str, float]:
    are_failed = [  # those of a state that steps of several responses share count for each
        rollout.failure is not None
        for places, group in zip(made.states, made.groups, strict=True)
        for rollout in group * len(places)
    ]
    counts = torch.tensor(
        [
            *(made.num_sampled_tokens, len(made.states), sum(are_failed), len(are_failed)),
            *(int(batch.response_mask.sum()), num_steps, len(batch)),
        ],
        dtype=torch.double,
    )
    tokens, prefixes, failed, judged, own, steps, responses = sum_over_ranks(counts).tolist()
    return {
        "vine/num_continuation_tokens": tokens,
        "vine/token_ratio": tokens / own,
        "vine/num_prefixes": prefixes,
        "vine/steps_mean": steps / responses,
        "vine/verifier_failure_share": failed / judged,
    }
