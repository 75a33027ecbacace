"""Responses sampled on from prefixes of others: Monte-Carlo estimates of what a prefix is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.rewards.scorer import Scorer
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.changed_responses import with_response
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.sampling_ahead import Stage
from vapo.types import Prompt, Rollout, RolloutBatch


@dataclass(frozen=True)
class Prefix:
    """The first `num_tokens` tokens of the response in a row; 0: the prompt alone."""

    row: int
    num_tokens: int


State = tuple[str, str, str, tuple[int, ...], tuple[int, ...]]


def state_of(rollouts: Sequence[Rollout], prefix: Prefix) -> State:
    """What a continuation depends on; ids of prompts alone may be equal in two sources."""
    rollout = rollouts[prefix.row]
    prompt = rollout.prompt
    ids = rollout.response_ids[: prefix.num_tokens]
    return prompt.source, prompt.prompt_id, prompt.answer, prompt.prompt_ids, ids


def distinct(rollouts: Sequence[Rollout], prefixes: Sequence[Prefix]) -> list[Prefix]:
    """One prefix of each state: those that are sampled on from."""
    return list({state_of(rollouts, prefix): prefix for prefix in prefixes}.values())


@dataclass(frozen=True)
class Continuations:
    """K whole responses from each of P prefixes.

    `batch` has the continued responses, prefixes and all, P groups of K rows; equal prefixes of
    one prompt have the same rows. `num_sampled_tokens` counts what the engine sampled.
    """

    prefixes: tuple[Prefix, ...]
    batch: RolloutBatch
    num_sampled_tokens: int

    def returns(self, rewards: Float[Tensor, " PK"], *, gamma: float) -> Float[Tensor, "P K"]:
        """The return of each continuation at its prefix: gamma^(tokens after the next) * reward."""
        size = self.batch.group_size
        starts = torch.tensor([p.num_tokens for p in self.prefixes]).repeat_interleave(size)
        after = (self.batch.response_lengths - 1 - starts).double()
        return (rewards.double() * gamma**after).view(-1, size)


def continue_responses(
    rollouts: Sequence[Rollout],
    prefixes: Sequence[Prefix],
    *,
    num_continuations: int,
    config: FitConfig,
    settings: SamplingSettings,
    sampler: Sampler,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    stage: Stage,
) -> Continuations:
    """Sample `num_continuations` responses on from each prefix, and judge them as whole responses.

    A continuation has what its prefix leaves of `settings.max_response_tokens`; the overlong
    punishment is that of the training budget. Equal prefixes of one prompt are sampled once. Every
    rank must call this, each with prefixes of its own: engines gather the actor's shards.

    Raises:
        ValueError: there is no prefix, one is the whole response, or has no token left.
    """
    if not prefixes:
        raise ValueError("no prefixes: a rank that has none would leave the others waiting")
    asked: dict[State, int] = {}
    places: list[int] = []
    starts: list[Rollout] = []
    for prefix in prefixes:
        rollout = rollouts[prefix.row]
        if prefix.num_tokens >= min(len(rollout.response_ids), settings.max_response_tokens):
            raise ValueError(f"{prefix}: nothing is left to sample")
        start = rollout.response_ids[: prefix.num_tokens]
        place = asked.setdefault(state_of(rollouts, prefix), len(starts))
        if place == len(starts):
            starts.append(replace(rollout, response_ids=start))
        places.append(place)
    total = len(starts) * num_continuations
    with stage("continuations", total=total, unit="responses") as advance:
        found = sampler.sample(
            [_extended(start, settings) for start in starts],
            group_size=num_continuations,
            settings=settings,
            seed=seed,
            advance=advance,
        )
    whole = [
        _whole(starts[i // num_continuations], rollout, tokenizer)
        for i, rollout in enumerate(found)
    ]
    with stage("scoring_continuations", total=total, unit="responses") as advance:
        verdicts = scorer.score(whole, advance=advance)
    rows = [place * num_continuations + j for place in places for j in range(num_continuations)]
    batch = make_rollout_batch(
        [whole[row] for row in rows],
        [verdicts[row] for row in rows],
        group_size=num_continuations,
        rewards=config.rewards,
        max_response_tokens=config.rollouts.max_response_tokens,
    )
    sampled = sum(len(rollout.response_ids) for rollout in found)
    return Continuations(tuple(prefixes), batch, sampled)


def _extended(start: Rollout, settings: SamplingSettings) -> Prompt:
    """The prompt with the response so far, and the budget that is left."""
    prompt, ids = start.prompt, start.response_ids
    return replace(
        prompt,
        prompt_id=f"{prompt.prompt_id}, after {len(ids)} tokens",
        prompt_ids=(*prompt.prompt_ids, *ids),
        max_response_tokens=settings.max_response_tokens - len(ids),
    )


def _whole(start: Rollout, end: Rollout, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    ids = (*start.response_ids, *end.response_ids)
    logprobs = start.rollout_logprobs[: len(start.response_ids)] + end.rollout_logprobs
    return with_response(start, ids, logprobs, end.finish_reason, tokenizer)
