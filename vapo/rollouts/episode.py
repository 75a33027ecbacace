"""One episode under way: its tokens, turns and rewards so far. A response is one of one turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from vapo.environments.contract import Verdict
from vapo.rollouts.engines.contract import SampledTurn
from vapo.rollouts.environment_inputs import Replayed, turn_text
from vapo.types import FinishReason, Prompt, Rollout, Turn

Key = tuple[int, int]


@dataclass
class Episode:
    """One episode under way: sample j of prompt i by its `key`.

    `ids` are the tokens behind the prompt so far: `num_observed` of them since the last sampled
    one, or `num_begun` of a turn that is continued. `text` is that of the last turn. `replay` is
    what its environment has still to be told again of an episode that is continued: each
    observation that must come, and what the policy said to it.
    """

    prompt: Prompt
    key: Key
    is_response: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_observed: int = 0
    num_begun: int = 0
    text: str = ""
    replay: deque[Replayed] = field(default_factory=deque)
    version: int | None = None
    finish_reason: FinishReason = FinishReason.LENGTH
    is_correct: bool | None = None
    extracted: str | None = None
    failure: str | None = None

    @property
    def last_id(self) -> int | None:
        """The last sampled token; None before the first turn."""
        return self.ids[-1] if self.turns else None

    def observe(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.logprobs.extend([0.0] * len(ids))
        self.num_observed += len(ids)

    def act(self, turn: SampledTurn, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids.extend(turn.ids)
        self.logprobs.extend(turn.logprobs)
        num_sampled = self.num_begun + len(turn.ids)
        updates = () if self.num_begun else turn.updates
        self.turns.append(
            Turn(self.num_observed, num_sampled, version=self.version, updates=updates)
        )
        self.text = turn_text(self.ids[len(self.ids) - num_sampled :], tokenizer)
        self.num_observed = self.num_begun = 0

    def earn(self, reward: float) -> None:
        """Put a reward on the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)

    def judge(self, verdict: Verdict) -> None:
        """Take what a verifier says of the response."""
        self.earn(verdict.reward)
        self.is_correct, self.extracted = verdict.is_correct, verdict.extracted
        self.failure = verdict.failure

    def rollout(self, tokenizer: PreTrainedTokenizerBase) -> Rollout:
        """The episode as it ended, without what was observed after its last turn."""
        ids = self.ids[: len(self.ids) - self.num_observed]
        is_one_turn = len(self.turns) == 1 and self.turns[0].num_sampled == len(ids)
        return Rollout(
            prompt=self.prompt,
            response_ids=tuple(ids),
            response_text=self.text if is_one_turn else turn_text(ids, tokenizer),
            rollout_logprobs=tuple(self.logprobs[: len(ids)]),
            finish_reason=self.finish_reason,
            turns=tuple(self.turns),
            is_correct=self.is_correct,
            extracted=self.extracted,
            failure=self.failure,
            in_environment=not self.is_response,
        )
