"""The `Sampler` whose responses are episodes: an engine, and what answers its turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.config.schema import FitConfig
from vapo.environments.contract import Environments
from vapo.environments.selection import make_environments
from vapo.rollouts.engines.contract import Sampler, SamplingSettings, TurnSampler
from vapo.rollouts.engines.selection import ActorAccess, make_sampler
from vapo.rollouts.episodes import Episode, EpisodeLoop, Key, Version, played, uncounted
from vapo.rollouts.observations import ObservationTokens
from vapo.types import Prompt, Rollout


class EpisodeSampler:
    """See `Sampler`. A rollout has turns; `max_response_tokens` counts observations, too.

    It closes the engine and the environments.

    Args:
        start_environments: called at once, and again for each loop that another thread runs.

    Raises: UserError: the observation template, or the environment, is not usable.
    """

    def __init__(
        self,
        engine: TurnSampler,
        start_environments: Callable[[], Environments],
        config: FitConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._engine, self._start_environments = engine, start_environments
        self._config, self._tokenizer = config, tokenizer
        self._observation_tokens = ObservationTokens(tokenizer, config)
        self._environments = start_environments()

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Rollout]:
        """See `Sampler.sample`. An episode whose environment fails has a `failure`."""
        asked = [(prompt, None) for prompt in prompts]
        return self._play(asked, group_size, settings, seed, advance)

    def sample_on(
        self,
        starts: Sequence[Rollout],
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Rollout]:
        """`group_size` whole episodes from each of these first turns, groups contiguous.

        Environments are told those turns again. Every rank must call this.
        """
        asked = [(start.prompt, start) for start in starts]
        return self._play(asked, group_size, settings, seed, advance)

    def _play(
        self,
        asked: Sequence[tuple[Prompt, Rollout | None]],
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None],
    ) -> list[Rollout]:
        ended: dict[Key, Episode] = {}
        with self._loop(self._environments, settings, seed=seed) as loop:
            for i, (prompt, start) in enumerate(asked):
                for j in range(group_size):
                    loop.add(prompt, (i, j), start=start)
            for episode in played(loop):
                ended[episode.key] = episode
                advance(1)
        return [
            ended[i, j].rollout(self._tokenizer)
            for i in range(len(asked))
            for j in range(group_size)
        ]

    @contextmanager
    def loop(
        self, settings: SamplingSettings, *, seed: int, version: Version
    ) -> Iterator[EpisodeLoop]:
        """A loop on this engine with environments of its own, which end with the context.

        Another loop, or `sample`, may run beside it, in another thread's pauses.
        """
        with (
            closing(self._start_environments()) as environments,
            self._loop(environments, settings, seed=seed, version=version) as loop,
        ):
            yield loop

    @contextmanager
    def _loop(
        self,
        environments: Environments,
        settings: SamplingSettings,
        *,
        seed: int,
        version: Version = uncounted,
    ) -> Iterator[EpisodeLoop]:
        with self._engine.turns(settings, seed=seed) as stream:
            loop = EpisodeLoop(
                stream,
                environments,
                config=self._config.environment,
                settings=settings,
                tokenizer=self._tokenizer,
                observation_tokens=self._observation_tokens,
                version=version,
            )
            try:
                yield loop
            finally:
                loop.abandon()

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Sampler.sync`."""
        self._engine.sync(weights)

    def sleep(self) -> None:
        """See `Sampler.sleep`."""
        self._engine.sleep()

    def close(self) -> None:
        """Free the engine and end the environments."""
        try:
            self._environments.close()
        finally:
            self._engine.close()


@contextmanager
def episode_loop(
    sampler: Sampler,
    config: FitConfig,
    tokenizer: PreTrainedTokenizerBase,
    settings: SamplingSettings,
    *,
    seed: int,
    version: Version,
) -> Iterator[EpisodeLoop]:
    """A loop of episodes of the sampler's environment, or of responses of one turn."""
    if isinstance(sampler, EpisodeSampler):
        with sampler.loop(settings, seed=seed, version=version) as loop:
            yield loop
        return
    engine = cast(TurnSampler, sampler)
    with engine.turns(settings, seed=seed) as stream:
        yield EpisodeLoop(
            stream,
            None,
            config=config.environment,
            settings=settings,
            tokenizer=tokenizer,
            observation_tokens=None,
            version=version,
        )


def make_rollout_sampler(
    config: FitConfig, actor: ActorAccess, tokenizer: PreTrainedTokenizerBase
) -> Sampler:
    """What samples the config's rollouts: its engine, or episodes of its environment on it.

    Raises: UserError: engine or environment cannot be made.
    """
    engine = make_sampler(config, actor, tokenizer)
    if not config.environment.is_used:
        return engine
    with ExitStack() as opened:
        opened.callback(engine.close)
        start = partial(make_environments, config)
        sampler = EpisodeSampler(cast(TurnSampler, engine), start, config, tokenizer)
        opened.pop_all()
    return sampler
