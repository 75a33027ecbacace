"""What plays all rollouts: an engine samples the turns, verifiers or an environment answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedTokenizerBase

from vapo.config.schema import FitConfig
from vapo.rewards.scorer import Scorer
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.episodes import Episode, EpisodeLoop, Key, Version, played
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
        asked: Sequence[Prompt] | Sequence[Rollout],
        *,
        group_size: int,
        settings: SamplingSettings,
        seed: int,
        advance: Callable[[int], None] = lambda n: None,
        first: int = 0,
    ) -> list[Rollout]:
        """Play `group_size` rollouts of each prompt, or on from each beginning of a rollout.

        Groups are contiguous, in the order of `asked`. A beginning's last turn is under way; of an
        episode it has whole turns, which its environment is told again.

        The tokens of (prompt i, sample j) depend on the weights, the prompt, `settings`, what the
        environment answers and (seed, first + i, j) only, not on how rows are batched (up to
        floating point). `advance(n)` is called as n more rollouts end. Every rank must call this:
        an engine may gather the actor's shards.

        Raises:
            UserError: a prompt does not fit, or no rollout has a verdict.
            EngineError: the engine failed; there is no partial result.
            NonFiniteLogitsError: the policy gives no distribution to sample from.
        """
        ended: dict[Key, Episode] = {}
        with self.loop(settings, seed=seed) as loop:
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
        self,
        settings: SamplingSettings,
        *,
        seed: int,
        num_responses: int | None = None,
        version: Version = lambda: None,
    ) -> Iterator[EpisodeLoop]:
        """A loop over the engine, whose open episodes are given up at the end.

        Args:
            num_responses: of a batch. With it the loop has environments of its own, so that
                another loop, or `play`, may run beside it, in another thread's pauses.
            version: the weight updates so far, recorded with each turn.
        """
        is_own = num_responses is not None
        environments = self.scorer.environments(own=is_own, num_responses=num_responses)
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


def ask(
    loop: EpisodeLoop,
    asked: Sequence[Prompt] | Sequence[Rollout],
    *,
    group_size: int,
    first: int = 0,
) -> list[Key]:
    """Add `group_size` episodes of each prompt, or from each beginning, to a loop.

    Returns the key (first + i, j) of each row; groups are contiguous, in the order of `asked`.
    """
    if group_size < 1:
        raise ValueError("group_size must be at least 1")
    starts = [one if isinstance(one, Rollout) else None for one in asked]
    prompts = [one.prompt if isinstance(one, Rollout) else one for one in asked]
    lengths = [
        len(prompt.prompt_ids) + (0 if start is None else len(start.response_ids))
        for prompt, start in zip(prompts, starts, strict=True)
    ]
    # Most tokens first: neighbours need little padding, and what tends to take longest does not
    # start last. The sort is stable: groups stay together.
    for i in sorted(range(len(asked)), key=lambda i: -lengths[i]):
        for j in range(group_size):
            loop.add(prompts[i], (first + i, j), start=starts[i])
    return [(first + i, j) for i in range(len(asked)) for j in range(group_size)]
