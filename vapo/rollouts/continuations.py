"""Continues responses from their middle, and measures the values of states by what these earn."""

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
from vapo.rollouts.player import RolloutRunner
from vapo.rollouts.segments import begun_turns, step_starts
from vapo.system.distributed import sum_over_ranks
from vapo.system.progress import Stage
from vapo.types import Rollout, RolloutBatch


@dataclass(frozen=True)
class Place:
    """A position in a batch: the state of a row after `num_tokens` tokens of its response.

    With 0 tokens it is the state after the prompt.
    """

    row: int
    num_tokens: int


@dataclass(frozen=True)
class MeasuredState(Place):
    """A position in a batch, and the return of each continuation that was sampled from its state.

    `num_places` requested positions share this state, and so its continuations. For example, the
    responses to one prompt share the state after the prompt.
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
        """An unbiased estimate of the variance of `mean`. There must be at least two returns."""
        num = len(self.returns)
        return self.squares / (num - 1) / num

    @property
    def num_draws(self) -> float:
        """How many continuations count for one of the positions that share this state.

        Over all these positions each continuation counts once.
        """
        return len(self.returns) / self.num_places


def group_by_state(rollouts: Sequence[Rollout], places: Sequence[Place]) -> list[list[Place]]:
    """Return lists of positions; those in one list share a state: prompt and tokens so far.

    A continuation depends on the state alone. The data source belongs to the state, as two sources
    may have prompts with the same id.
    """
    places_by_state: dict[Hashable, list[Place]] = defaultdict(list)
    for place in places:
        rollout = rollouts[place.row]
        prompt, ids = rollout.prompt, rollout.response_ids[: place.num_tokens]
        key = (prompt.source, prompt.prompt_id, prompt.answer, prompt.prompt_ids, ids)
        places_by_state[key].append(place)
    return list(places_by_state.values())


@dataclass(frozen=True)
class Continuations:
    """The result of `ContinuationSampler.sample`: K continued responses from each different state.

    `states` has for each state the positions that share it. `batch` has the continued responses
    from their beginnings on, a group of K rows for each state. The engine sampled
    `num_sampled_tokens` of their tokens.
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
        """Return for each position its state with the discounted returns of its continuations.

            return = sum over later rewards of gamma^(sampled tokens from the next one to the
                     reward's)

        A position is left out if the environment of one of its continuations failed.

        Args:
            rewards: the rewards of the rows of `batch`.
        """
        placed = placed_rewards(self.batch, rewards.double())
        returns = monte_carlo_returns(placed, self.batch.response_mask, gamma=gamma)
        returns_by_state = returns.split(self.batch.group_size)
        measured_states = {}
        for places, group, state_returns in zip(
            self.states, self.groups, returns_by_state, strict=True
        ):
            if any(rollout.is_lost for rollout in group):
                continue
            draws = tuple(state_returns[:, places[0].num_tokens].tolist())
            for place in places:
                measured_states[place] = MeasuredState(
                    place.row, place.num_tokens, draws, num_places=len(places)
                )
        return measured_states


@dataclass(frozen=True)
class ContinuationSampler:
    """Continues responses from given positions, and judges the continued responses as a whole.

    A continuation may use what its prefix leaves of `settings.max_response_tokens`. The punishment
    of overlong responses is computed with the config's `rollouts.max_response_tokens`.

    Args:
        settings: the settings with which the responses were sampled.
        stage: where progress is reported.
    """

    config: FitConfig
    settings: SamplingSettings
    player: RolloutRunner
    stage: Stage

    def sample(
        self,
        rollouts: Sequence[Rollout],
        places: Sequence[Place],
        *,
        num_continuations: int,
        seed: int,
    ) -> Continuations:
        """Continue responses `num_continuations` times from each of the positions, and judge them.

        Positions that share a state share its continuations. Every rank must call this, with its
        own positions, as an engine may gather the actor's shards.

        Raises: ValueError: there is no position, or at one of them no token is left to sample.
        """
        if not places:
            raise ValueError("no places: a rank that has none would leave the others waiting")
        for place in places:
            length = len(rollouts[place.row].response_ids)
            if place.num_tokens >= min(length, self.settings.max_response_tokens):
                raise ValueError(f"{place}: nothing is left to sample")
        states = group_by_state(rollouts, places)
        starts = [beginning_of(rollouts[first.row], first.num_tokens) for first, *_ in states]
        total = len(starts) * num_continuations
        with self.stage("continuations", total=total, unit="responses") as advance:
            whole_responses = self.player.play(
                starts,
                group_size=num_continuations,
                settings=self.settings,
                seed=seed,
                advance=advance,
            )
        check_replayed(whole_responses)
        batch = make_rollout_batch(
            whole_responses,
            group_size=num_continuations,
            rewards=self.config.rewards,
            max_response_tokens=self.config.rollouts.max_response_tokens,
        )
        num_sampled = sum(
            sum(rollout.is_sampled[len(starts[i // num_continuations].response_ids) :])
            for i, rollout in enumerate(whole_responses)
        )
        return Continuations(states, batch, num_sampled)


def beginning_of(rollout: Rollout, num_tokens: int) -> Rollout:
    """Return a rollout as it was after `num_tokens` tokens of its response, to be continued.

    Its last turn has not ended.

    Raises: ValueError: the rollout cannot be continued from there.
    """
    return replace(
        rollout,
        response_ids=rollout.response_ids[:num_tokens],
        rollout_logprobs=rollout.rollout_logprobs[:num_tokens],
        turns=begun_turns(rollout, num_tokens),
    )


def check_replayed(rollouts: Sequence[Rollout]) -> None:
    """Check that no continued rollout has failed because its environment had changed its answers.

    Before an episode is continued, its environment gets the turns so far again.

    Raises: UserError: an environment answered them differently than the first time.
    """
    failed = [r for r in rollouts if r.is_lost and str(r.failure).startswith(REPLAY)]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(rollouts)} continuations could not begin (prompt "
            f"{failed[0].prompt.prompt_id}): {failed[0].failure}; draw numbers from "
            "random.Random(row['seed']), or switch off what continues responses (value_truth)"
        )


def with_step_values(
    batch: RolloutBatch, continuation_sampler: ContinuationSampler, *, seed: int
) -> tuple[RolloutBatch, dict[str, float]]:
    """Return the batch with `step_starts` and `step_values`, and metrics of the continuations.

        V(s) = mean reward of K continuations from s

    s is the state at the start of a step, a part of a response. The rewards include the punishment
    of overlong responses as those of the batch do. A response that carries no loss is not
    continued: the value of its steps is its own reward, so that its advantages are 0. Every rank
    must call this, with its own rows.

    Source: VinePPO (arXiv 2410.01679). Metrics are over all ranks.
    """
    options = continuation_sampler.config.algorithm
    assert isinstance(options, VineOptions)
    tokenizer = continuation_sampler.player.tokenizer
    starts = [step_starts(rollout, options.vine_segments, tokenizer) for rollout in batch.rollouts]
    rows = batch.loss_mask.any(dim=1).nonzero().flatten().tolist()
    places = [Place(row, start) for row in rows for start in starts[row]]
    continuations = continuation_sampler.sample(
        batch.rollouts,
        places or [Place(0, 0)],  # an engine may gather the actor's shards: all ranks must call
        num_continuations=options.vine_continuations,
        seed=seed,
    )
    measured = continuations.measured(continuations.batch.rewards, gamma=1.0)
    is_start = torch.zeros_like(batch.response_mask)
    for row, row_starts in enumerate(starts):
        is_start[row, row_starts] = True
    values = batch.rewards[:, None].repeat(1, batch.response_mask.shape[1])
    for place in places:
        values[place.row, place.num_tokens :] = measured[place].mean
    values = torch.where(batch.response_mask, values, 0.0)
    batch = replace(batch, step_starts=is_start, step_values=values)
    return batch, _metrics(continuations, batch, int(is_start.sum()))


def _metrics(continuations: Continuations, batch: RolloutBatch, num_steps: int) -> dict[str, float]:
    are_failed = [  # a continuation counts for each place that shares its state
        rollout.failure is not None
        for places, group in zip(continuations.states, continuations.groups, strict=True)
        for rollout in group * len(places)
    ]
    counts = torch.tensor(
        [
            *(
                continuations.num_sampled_tokens,
                len(continuations.states),
                sum(are_failed),
                len(are_failed),
            ),
            *(int(batch.response_mask.sum()), num_steps, len(batch)),
        ],
        dtype=torch.double,
    )
    tokens, prefixes, failed, judged, batch_tokens, steps, responses = sum_over_ranks(
        counts
    ).tolist()
    return {
        "vine/num_continuation_tokens": tokens,
        "vine/token_ratio": tokens / batch_tokens,
        "vine/num_prefixes": prefixes,
        "vine/steps_mean": steps / responses,
        "vine/verifier_failure_share": failed / judged,
    }
