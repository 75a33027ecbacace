"""All responses of a batch, as a run plays them, without verdicts that mean anything."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.config.kinds import make
from vapo.config.schema import RewardConfig
from vapo.rewards.scorer import make_scorer
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.player import RolloutRunner
from vapo.types import Prompt, Rollout


def sample_all(
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    settings: SamplingSettings,
    seed: int,
) -> list[Rollout]:
    """Compare each response with its prompt's answer: no verifier's process is needed."""
    config = FitConfig(rewards=make(RewardConfig, verifier="exact"))
    scorer = make_scorer(config)
    player = RolloutRunner(config, sampler, scorer, tokenizer)
    return player.play(prompts, group_size=group_size, settings=settings, seed=seed)
