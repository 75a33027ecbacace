"""What the thread that samples continuously asks of the collection of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from vapo.rewards.shuffling import with_shuffled_verdicts
from vapo.rollouts.collection import RolloutCollection, attempt_keys
from vapo.rollouts.dynamic_sampling import Filling, Group, groups_of
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.episode import Episode
from vapo.rollouts.episodes import EpisodeLoop
from vapo.system.distributed import rank, world_size
from vapo.system.seeding import derive_seed
from vapo.types import Phase, Prompt, Rollout


@dataclass(frozen=True)
class CollectionOrders:
    """See `Orders`. `phase` is the one that trains on what is sampled."""

    collection: RolloutCollection
    phase: Phase

    @property
    def group_size(self) -> int:
        return self.collection.hyperparameters.group_size

    def prompts(self, iteration: int, attempt: int) -> Sequence[Prompt]:
        return self.collection.attempt_prompts(iteration, attempt)

    def groups(self, rollouts: Sequence[Rollout], iteration: int, attempt: int) -> list[Group]:
        self.collection.player.scorer.check(rollouts)
        keys = attempt_keys(iteration, attempt)
        seed = self.collection.shuffle_seed("shuffled verdicts", *keys)
        return groups_of(with_shuffled_verdicts(rollouts, seed), self.group_size)

    def filling(self) -> Filling:
        return self.collection.filling(self.phase)

    def loop(self, version: Callable[[], int]) -> AbstractContextManager[EpisodeLoop]:
        config, hyperparameters = self.collection.config, self.collection.hyperparameters
        return self.collection.player.loop(
            sampling_settings(config.rollouts),
            seed=derive_seed(config.seed, "rollouts ahead", rank()),
            num_responses=hyperparameters.num_prompts // world_size() * self.group_size,
            version=version,
        )

    def rollout(self, episode: Episode) -> Rollout:
        return episode.rollout(self.collection.player.tokenizer)
