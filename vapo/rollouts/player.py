"""What plays all rollouts: an engine samples the turns, verifiers or an environment answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from transformers import PreTrainedTokenizerBase

from vapo.config.schema import FitConfig
from vapo.environments.contract import Environments
from vapo.rewards.scorer import Scorer
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.episode import Episode, Key
from vapo.rollouts.episodes import EpisodeLoop, Version, played, uncounted
from vapo.rollouts.observations import ObservationTokens
from vapo.types import Prompt, Rollout


class Player:
    """Plays rollouts on a sampler's engine, with what the scorer has to answer them.

    It closes neither.

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
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None] = lambda n: None,
        first: int = 0,
    ) -> list[Rollout]:
        """Play `group_size` rollouts of each prompt; groups contiguous, in the prompts' order.

        The tokens of (prompt i, sample j) depend on the weights, the prompt, `settings`, what the
        environment answers and (seed, first + i, j) only, not on how rows are batched (up to
        floating point). `advance(n)` is called as n more rollouts end. Every rank must call this:
        an engine may gather the actor's shards.

        Raises:
            UserError: a prompt does not fit, or no rollout has a verdict.
            EngineError: the engine failed; there is no partial result.
            NonFiniteLogitsError: the policy gives no distribution to sample from.
        """
        asked = [(prompt, None) for prompt in prompts]
        return self._play(asked, group_size, settings, seed, advance, first)

    def play_on(
        self,
        starts: Sequence[Rollout],
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Rollout]:
        """`group_size` whole rollouts from each of these beginnings, groups contiguous.

        Of an episode they are whole turns, which its environment is told again. Every rank must
        call this.
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
        first: int = 0,
    ) -> list[Rollout]:
        ended: dict[Key, Episode] = {}
        with self._loop(self.scorer.environments(), settings, seed=seed) as loop:
            rows = ask(loop, asked, group_size=group_size, first=first)
            for episode in played(loop):
                ended[episode.key] = episode
                advance(1)
        return self.rollouts([ended[key] for key in rows])

    def rollouts(self, ended: Sequence[Episode]) -> list[Rollout]:
        """The rollouts of a batch's episodes, row by row.

        Raises: UserError: none has a verdict.
        """
        rollouts = [episode.rollout(self.tokenizer) for episode in ended]
        self.scorer.check(rollouts)
        return rollouts

    @contextmanager
    def loop(
        self, settings: SamplingSettings, *, seed: int, num_responses: int, version: Version
    ) -> Iterator[EpisodeLoop]:
        """A loop with environments of its own, which end with the context.

        Another loop, or `play`, may run beside it, in another thread's pauses.

        Args:
            num_responses: of a batch.
            version: the weight updates so far, recorded with each turn.
        """
        environments = self.scorer.environments(own=True, num_responses=num_responses)
        with self._loop(environments, settings, seed=seed, version=version) as loop:
            yield loop

    @contextmanager
    def _loop(
        self,
        environments: AbstractContextManager[Environments],
        settings: SamplingSettings,
        *,
        seed: int,
        version: Version = uncounted,
    ) -> Iterator[EpisodeLoop]:
        with environments as answering, self.sampler.turns(settings, seed=seed) as stream:
            loop = EpisodeLoop(
                stream,
                answering,
                config=self.config.environment.episode_options,
                settings=settings,
                tokenizer=self.tokenizer,
                observation_tokens=self._observation_tokens,
                version=version,
            )
            try:
                yield loop
            finally:
                loop.abandon()


def ask(
    loop: EpisodeLoop,
    asked: Sequence[tuple[Prompt, Rollout | None]],
    *,
    group_size: int,
    first: int = 0,
) -> list[Key]:
    """Add `group_size` episodes of each prompt, or from each beginning, to a loop.

    Returns the key (first + i, j) of each row; groups are contiguous, in the order of `asked`.
    """
    if group_size < 1:
        raise ValueError("group_size must be at least 1")
    # Most tokens first: neighbours need little padding, and what tends to take longest does not
    # start last. The sort is stable: groups stay together.
    for i in sorted(range(len(asked)), key=lambda i: -_num_tokens(*asked[i])):
        prompt, start = asked[i]
        for j in range(group_size):
            loop.add(prompt, (first + i, j), start=start)
    return [(first + i, j) for i in range(len(asked)) for j in range(group_size)]


def _num_tokens(prompt: Prompt, start: Rollout | None) -> int:
    return len(prompt.prompt_ids) + (0 if start is None else len(start.response_ids))
