"""Plays rollouts: an engine samples the turns, verifiers or an environment answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedTokenizerBase

from vapo.config.schema import FitConfig
from vapo.rewards.scorer import Scorer
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.episodes import Episode, EpisodeLoop, Key, Version, ended_episodes
from vapo.rollouts.observations import ObservationTokens
from vapo.types import Prompt, Rollout


class RolloutRunner:
    """Plays rollouts: a sampler's engine samples turns, and a scorer's verifiers or environments
    answer them.

    The caller closes sampler and scorer.

    Args:
        tokenizer: the policy's.

    Raises: UserError: the observation template is not usable.
    """

    def __init__(
        self,
        config: FitConfig,
        sampler: Sampler,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config = config
        self.sampler, self.scorer, self.tokenizer = sampler, scorer, tokenizer
        self._observation_tokens = None
        if config.environment.is_used:
            self._observation_tokens = ObservationTokens(tokenizer, config)

    def play(
        self,
        starting_points: Sequence[Prompt] | Sequence[Rollout],
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None] = lambda n: None,
        first: int = 0,
    ) -> list[Rollout]:
        """Play `group_size` rollouts of each prompt, or continue each rollout that often.

        Groups are contiguous, in the order of `starting_points`. A rollout that is continued has an
        unfinished last turn; its environment gets the turns before that one again.

        The tokens of (prompt i, sample j) depend on the weights, the prompt, `settings`, what the
        environment answers and (seed, first + i, j) only, not on how rows are batched (up to
        floating point). `advance(n)` is called when n more rollouts end. Every rank must call this:
        an engine may gather the actor's shards.

        Raises:
            UserError: a prompt does not fit, or no rollout has a verdict.
            EngineError: the engine failed; there is no partial result.
            NonFiniteLogitsError: the policy gives no distribution to sample from.
        """
        episodes_by_key: dict[Key, Episode] = {}
        with self.loop(settings, seed=seed) as loop:
            rows = enqueue_episodes(loop, starting_points, group_size=group_size, first=first)
            for episode in ended_episodes(loop):
                episodes_by_key[episode.key] = episode
                advance(1)
        return self.rollouts([episodes_by_key[key] for key in rows])

    def rollouts(self, episodes: Sequence[Episode]) -> list[Rollout]:
        """Return the rollouts of ended episodes, in the same order.

        Raises: UserError: no rollout has a verdict.
        """
        rollouts = [episode.rollout(self.tokenizer) for episode in episodes]
        self.scorer.check(rollouts)
        return rollouts

    @contextmanager
    def loop(
        self,
        settings: SamplingSettings,
        *,
        seed: int,
        num_responses: int | None = None,
        version: Version = lambda: None,
    ) -> Iterator[EpisodeLoop]:
        """Yield a loop that plays episodes with the engine. At the end of the block it drops the
        episodes that have not ended.

        Args:
            num_responses: the responses of a batch. With it the loop has environments of its own,
                so that `play` or another loop may run while this loop's thread is paused.
            version: returns the weight updates so far, which are recorded with each turn.
        """
        has_environments = num_responses is not None
        environments = self.scorer.environments(
            has_own_processes=has_environments, num_responses=num_responses
        )
        with environments as answering, self.sampler.turns(settings, seed=seed) as stream:
            loop = EpisodeLoop(
                stream,
                answering,
                config=self.config.environment.episode_options,
                settings=settings,
                tokenizer=self.tokenizer,
                observation_tokens=self._observation_tokens,
                version=version,
                keeps_special=self.config.rewards.keep_special_tokens,
            )
            try:
                yield loop
            finally:
                loop.abandon()


def enqueue_episodes(
    loop: EpisodeLoop,
    starting_points: Sequence[Prompt] | Sequence[Rollout],
    *,
    group_size: int,
    first: int = 0,
) -> list[Key]:
    """Add `group_size` episodes for each prompt, or each rollout to be continued, to a loop.

    Returns: the episodes' keys (first + i, j) for the j-th episode of the i-th starting point, in
        the order of `starting_points`.
    """
    if group_size < 1:
        raise ValueError("group_size must be at least 1")
    starts = [point if isinstance(point, Rollout) else None for point in starting_points]
    prompts = [point.prompt if isinstance(point, Rollout) else point for point in starting_points]
    lengths = [
        len(prompt.prompt_ids) + (0 if start is None else len(start.response_ids))
        for prompt, start in zip(prompts, starts, strict=True)
    ]
    # Most tokens first: neighbours need little padding, and what tends to take longest does not
    # start last. The sort is stable: groups stay together.
    for i in sorted(range(len(starting_points)), key=lambda i: -lengths[i]):
        for j in range(group_size):
            loop.add(prompts[i], (first + i, j), start=starts[i])
    return [(first + i, j) for i in range(len(starting_points)) for j in range(group_size)]
