"""Rollouts in tests: real engines whose responses nobody judges, and verdicts by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any

from transformers import PreTrainedTokenizerBase

from tests.judged import not_judged
from tests.tiny_model import tiny_tokenizer
from vapo.config import FitConfig
from vapo.environments.contract import Environments, Verdict
from vapo.rewards.judged_responses import JudgedResponses, OnVerdict
from vapo.rewards.scorer import EnvironmentScorer, Scorer, VerifierScorer
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.player import RolloutRunner
from vapo.types import Prompt, Rollout


class InstantScorer(VerifierScorer):
    """A scorer without processes: `verdicts` says at once what is right, here nothing."""

    def __init__(self) -> None:
        self.judges = []

    def verdicts(
        self, rollouts: Sequence[Rollout], *, advance: Callable[[int], None] = lambda n: None
    ) -> list[Verdict]:
        return [Verdict(False, -1.0) for _ in rollouts]

    def environments(
        self, *, has_own_processes: bool = False, num_responses: int | None = None
    ) -> AbstractContextManager[Environments]:
        return closing(JudgedResponses(self))

    def submit(
        self, rollout: Rollout, on_verdict: OnVerdict, *, num_responses: int | None = None
    ) -> Callable[[], None]:
        on_verdict(self.verdicts([rollout])[0])
        return lambda: None

    def poll(self, timeout_s: float) -> None: ...

    def check(self, rollouts: Sequence[Rollout]) -> None: ...

    def close(self) -> None: ...


class AnsweringScorer(InstantScorer):
    """Scripted environments answer."""

    failures = EnvironmentScorer.failures

    def __init__(self, environments: Environments) -> None:
        super().__init__()
        self.answering = environments

    def environments(self, **_: Any) -> AbstractContextManager[Environments]:
        return closing(self.answering)


def player_of(
    sampler: Sampler,
    scorer: Scorer | None = None,
    config: FitConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> RolloutRunner:
    return RolloutRunner(
        config or FitConfig(), sampler, scorer or InstantScorer(), tokenizer or tiny_tokenizer()
    )


def sample_all(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    settings: SamplingSettings,
    seed: int,
    advance: Callable[[int], None] = lambda n: None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Rollout]:
    """An engine's responses, without verdicts, as rollouts of its own tokens."""
    rollouts = player_of(sampler, tokenizer=tokenizer).play(
        prompts, group_size=group_size, settings=settings, seed=seed, advance=advance
    )
    return [not_judged(rollout) for rollout in rollouts]
