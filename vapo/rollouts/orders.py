"""What the thread that samples continuously asks of the collection of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from vapo.rollouts.collection import RolloutCollection, attempt_keys
from vapo.rollouts.dynamic_sampling import Filling
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.episode_sampler import episode_loop
from vapo.rollouts.episodes import Episode, EpisodeLoop
from vapo.system.distributed import rank
from vapo.system.seeding import derive_seed
from vapo.types import Phase, Prompt, Rollout, Verdict


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

    def judge(self, rollouts: Sequence[Rollout], iteration: int, attempt: int) -> list[Verdict]:
        keys = attempt_keys(iteration, attempt)
        seed = self.collection.shuffle_seed("shuffled verdicts", *keys)
        return self.collection.scorer.score(rollouts, shuffle_seed=seed)

    def filling(self) -> Filling:
        return self.collection.filling(self.phase)

    def loop(self, version: Callable[[], int]) -> AbstractContextManager[EpisodeLoop]:
        config, tokenizer = self.collection.config, self.collection.tokenizer
        return episode_loop(
            self.collection.sampler,
            config,
            tokenizer,
            sampling_settings(config.rollouts),
            seed=derive_seed(config.seed, "rollouts ahead", rank()),
            version=version,
        )

    def rollout(self, episode: Episode) -> Rollout:
        return episode.rollout(self.collection.tokenizer)
