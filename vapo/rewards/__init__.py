"""Rewards: response text and reference answer -> verdict and reward.

This module stays light (no torch), because the verifier processes import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from vapo.config.schema import DataConfig, RewardConfig
    from vapo.rewards.scorer import Scorer


@dataclass(frozen=True)
class Judgement:
    """A verifier's answer. `reward` None stands for the configured correct / incorrect reward."""

    is_correct: bool
    reward: float | None = None
    extracted: str | None = None


@runtime_checkable
class Verifier(Protocol):
    """Judges one response. May raise, hang or crash: it runs in a process of its own."""

    def __call__(
        self, response_text: str, answer: str, metadata: Mapping[str, Any]
    ) -> Judgement: ...


def make_scorer(
    rewards: RewardConfig, *, max_response_tokens: int, data: DataConfig | None = None
) -> Scorer:
    """The scorer of this config, its settings checked and its verifier processes started.

    With `data`, sources of a mixture that name a verifier of their own are judged by it.

    Raises:
        UserError: a setting is missing or unusable, or the verifier cannot be imported.
    """
    from vapo.rewards.by_source import ScorerBySource, rewards_by_source
    from vapo.rewards.scorer import Scorer

    by_source = {} if data is None else rewards_by_source(rewards, data)
    if all(own is rewards for own in by_source.values()):
        return Scorer(rewards, max_response_tokens=max_response_tokens)
    return ScorerBySource(by_source, max_response_tokens=max_response_tokens)
