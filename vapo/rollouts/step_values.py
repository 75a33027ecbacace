"""What the steps of responses are worth: the mean reward of fresh continuations (VinePPO)."""

from __future__ import annotations

from dataclasses import replace

import torch

from vapo.config.algorithm import VineOptions
from vapo.rollouts.continuations import Continuations, Continuer, Place
from vapo.rollouts.segments import step_starts
from vapo.system.distributed import sum_over_ranks
from vapo.types import RolloutBatch


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
    return batch, _metrics(made, batch)


def _metrics(made: Continuations, batch: RolloutBatch) -> dict[str, float]:
    assert batch.step_starts is not None
    are_failed = [  # those of a state that steps of several responses share count for each
        rollout.failure is not None
        for places, group in zip(made.states, made.groups, strict=True)
        for rollout in group * len(places)
    ]
    counts = torch.tensor(
        [
            *(made.num_sampled_tokens, len(made.states), sum(are_failed), len(are_failed)),
            *(int(batch.response_mask.sum()), int(batch.step_starts.sum()), len(batch)),
        ],
        dtype=torch.double,
    )
    tokens, prefixes, failed, judged, own, steps, responses = sum_over_ranks(counts).tolist()
    return {
        "vine/continuation_tokens": tokens,
        "vine/token_ratio": tokens / own,
        "vine/num_prefixes": prefixes,
        "vine/steps_mean": steps / responses,
        "vine/verifier_failure_share": failed / judged,
    }
