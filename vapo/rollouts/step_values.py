"""What the steps of responses are worth: the mean reward of fresh continuations (VinePPO)."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.config.algorithm import VineOptions
from vapo.rollouts.continuations import Continuations, Continuer, Prefix
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
    # An engine may gather the actor's shards in each call, so a rank without a row takes a prefix.
    prefixes = [Prefix(row, start) for row in rows for start in starts[row]] or [Prefix(0, 0)]
    made = continuer.sample(
        batch.rollouts, prefixes, num_continuations=options.vine_continuations, seed=seed
    )
    is_start = torch.zeros_like(batch.response_mask)
    for row, places in enumerate(starts):
        is_start[row, places] = True
    values = batch.rewards[:, None].repeat(1, batch.response_mask.shape[1])
    for prefix, value in zip(made.prefixes, _mean_rewards(made, batch), strict=True):
        if not rows:
            break
        values[prefix.row, prefix.num_tokens :] = value
    values = torch.where(batch.response_mask, values, 0.0)
    batch = replace(batch, step_starts=is_start, step_values=values)
    return batch, _metrics(made, batch)


def _mean_rewards(made: Continuations, batch: RolloutBatch) -> Float[Tensor, " P"]:
    groups = made.batch.rewards.double().view(-1, made.batch.group_size)
    return groups.mean(dim=1).to(batch.rewards.dtype)


def _metrics(made: Continuations, batch: RolloutBatch) -> dict[str, float]:
    assert batch.step_starts is not None
    failed = sum(rollout.failure is not None for rollout in made.batch.rollouts)
    counts = torch.tensor(
        [
            *(made.num_sampled_tokens, made.num_states, failed, len(made.batch)),
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
