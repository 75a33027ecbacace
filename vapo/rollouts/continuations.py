"""Responses sampled on from prefixes of others: Monte-Carlo estimates of what a prefix is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.functional.advantages import monte_carlo_returns
from vapo.functional.columns import placed_rewards
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.episodes import REPLAY
from vapo.rollouts.player import Player
from vapo.rollouts.segments import begun_turns
from vapo.system.progress import Stage
from vapo.types import Rollout, RolloutBatch


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
    one prompt have the same rows. `num_states` counts the different prefixes, from which the engine
    sampled `num_sampled_tokens`.
    """

    prefixes: tuple[Prefix, ...]
    batch: RolloutBatch
    num_states: int
    num_sampled_tokens: int

    def returns(self, rewards: Float[Tensor, " PK"], *, gamma: float) -> Float[Tensor, "P K"]:
        """The return of each continuation at its prefix: what it earned after it, discounted.

            sum over rewards of gamma^(sampled tokens from the next one to the reward's)

        The rewards of earlier turns are not in it.
        """
        size = self.batch.group_size
        starts = torch.tensor([p.num_tokens for p in self.prefixes]).repeat_interleave(size)
        placed = placed_rewards(self.batch, rewards.double())
        returns = monte_carlo_returns(placed, self.batch.response_mask, gamma=gamma)
        # what failed before it came to its prefix has no column there, and is not `whole`
        columns = starts.clamp(max=returns.shape[1] - 1)
        return returns.gather(1, columns[:, None]).view(-1, size)

    @property
    def are_whole(self) -> list[bool]:
        """Of each prefix, whether no continuation was lost to its environment."""
        failed = [rollout.is_lost for rollout in self.batch.rollouts]
        size = self.batch.group_size
        return [not any(failed[i : i + size]) for i in range(0, len(failed), size)]


@dataclass(frozen=True)
class Continuer:
    """Samples on from prefixes, and judges what comes of them as whole responses.

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
        prefixes: Sequence[Prefix],
        *,
        num_continuations: int,
        seed: int,
    ) -> Continuations:
        """Sample `num_continuations` responses on from each prefix, and judge them.

        Equal prefixes of one prompt are sampled once. Every rank must call this, each with
        prefixes of its own: engines gather the actor's shards.

        Raises:
            ValueError: there is no prefix, one is the whole response, or has no token left.
        """
        if not prefixes:
            raise ValueError("no prefixes: a rank that has none would leave the others waiting")
        starts, places = self._starts(rollouts, prefixes)
        total = len(starts) * num_continuations
        with self.stage("continuations", total=total, unit="responses") as advance:
            whole = self.player.play_on(
                starts,
                group_size=num_continuations,
                settings=self.settings,
                seed=seed,
                advance=advance,
            )
        check_replayed(whole)
        rows = [place * num_continuations + j for place in places for j in range(num_continuations)]
        batch = make_rollout_batch(
            [whole[row] for row in rows],
            group_size=num_continuations,
            rewards=self.config.rewards,
            max_response_tokens=self.config.rollouts.max_response_tokens,
        )
        sampled = sum(
            sum(rollout.is_sampled[len(starts[i // num_continuations].response_ids) :])
            for i, rollout in enumerate(whole)
        )
        return Continuations(tuple(prefixes), batch, len(starts), sampled)

    def _starts(
        self, rollouts: Sequence[Rollout], prefixes: Sequence[Prefix]
    ) -> tuple[list[Rollout], list[int]]:
        """The response so far of each different prefix, and which of them each prefix is."""
        asked: dict[State, int] = {}
        places: list[int] = []
        starts: list[Rollout] = []
        for prefix in prefixes:
            rollout = rollouts[prefix.row]
            most = min(len(rollout.response_ids), self.settings.max_response_tokens)
            if prefix.num_tokens >= most:
                raise ValueError(f"{prefix}: nothing is left to sample")
            place = asked.setdefault(state_of(rollouts, prefix), len(starts))
            if place == len(starts):
                starts.append(first_tokens(rollout, prefix.num_tokens))
            places.append(place)
        return starts, places


def first_tokens(rollout: Rollout, num_tokens: int) -> Rollout:
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
