"""The data that flows between the stages, and the shape legend that every annotation uses.

    B  rollouts in a batch
    T  response tokens, right-padded to the longest response; in episodes also observed tokens
    S  prompt + response tokens
    V  vocabulary
    H  hidden size
    L  layers whose hidden states are read
    K  bins of a categorical value head
    M  critics of an ensemble
    N  prompts
    G  group size (rollouts of one prompt); rollouts of one group are contiguous, B = N * G
    n  tokens, flattened over rows

Dtypes: token ids int64, masks bool, everything else float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any, NamedTuple, TypedDict

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class FinishReason(StrEnum):
    """Why a response ended. Truncated is not finished: only `STOP` emitted the end token.

    An episode is finished if its environment ended it. Before that, a turn may reach the limit of
    its length (`TURN_LENGTH`), or the episode its limit of turns (`TURNS`). Both are truncated.
    """

    STOP = "stop"
    LENGTH = "length"
    TURN_LENGTH = "turn_length"
    TURNS = "turns"


class Phase(StrEnum):
    """The phases of a run: the critic alone is trained, or the policy with its critic."""

    VALUE_PRETRAINING = "value_pretraining"
    POLICY_OPTIMIZATION = "policy_optimization"


@dataclass(frozen=True)
class IterationStart:
    """The run's counters and phase when an iteration begins.

    `number` is 1 for the first iteration of the run, whatever its phase. `policy_iterations` and
    `policy_steps` count the iterations and optimizer steps of the policy phase before it.
    """

    number: int
    phase: Phase
    policy_iterations: int = 0
    policy_steps: int = 0

    @property
    def index(self) -> int:
        """The iteration counted from 0, from which seeds, prompts and file names are derived."""
        return self.number - 1


@dataclass(frozen=True)
class Prompt:
    """One problem. `text` is the policy's input, after the template.

    `source` is the name of its data set in a mixture, else empty. `record` is its row in the file.
    `demonstration` is a worked response, or the policy's turns of an episode.
    `critic_prompt_ids` replace `prompt_ids` for the critic, or for OPPO's pass in which the
    policy reads the answer first; None: they are the same.
    `max_response_tokens` limits its responses. If None or above the run's limit, the run's applies.
    `problem` is the row's text or messages before any template; empty: unknown.
    """

    prompt_id: str
    text: str
    prompt_ids: tuple[int, ...]
    answer: str
    demonstration: str | tuple[str, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    critic_prompt_ids: tuple[int, ...] | None = None
    max_response_tokens: int | None = None
    problem: str | Sequence[Mapping[str, str]] = ""

    @property
    def columns(self) -> dict[str, Any]:
        """The metadata for a verifier: the row of the file, with the problem under `prompt`."""
        return {"prompt": self.problem or self.text, **self.record, **self.metadata}

    def budget(self, run_limit: int) -> int:
        """Return the most tokens of a response to this prompt; `run_limit` is the run's limit."""
        prompt_limit = self.max_response_tokens
        return run_limit if prompt_limit is None else min(prompt_limit, run_limit)


@dataclass(frozen=True)
class Turn:
    """One turn: what the environment wrote, then what the policy sampled.

    `num_observed` and `num_sampled` count tokens. `reward` is what environment or verifier gave for
    the sampled tokens, and belongs to the last of them. `version` counts the weight updates before
    the turn was requested; None: they are not counted. If weights were updated while the turn was
    sampled and the engine reports it, `updates` has for each part of the turn, in order, the number
    of updates since the request and the number of tokens.
    """

    num_observed: int
    num_sampled: int
    reward: float = 0.0
    version: int | None = None
    updates: tuple[tuple[int, int], ...] = ()

    @property
    def versions(self) -> list[tuple[int, int]]:
        """The number of weight updates and the number of tokens of each part of the turn, in order.

        The list is empty if updates are not counted.
        """
        if self.version is None:
            return []
        return [(self.version + n, num) for n, num in self.updates or ((0, self.num_sampled),)]


class TurnSpan(NamedTuple):
    """Where a turn is in `response_ids`: observed from `begin`, sampled from `first` to `end`."""

    begin: int
    first: int
    end: int


class VerifierVerdict(TypedDict):
    """The verdict of one of several verifiers on a response, and its reward without the weight."""

    is_correct: bool
    reward: float
    extracted: str | None
    failure: str | None


@dataclass(frozen=True)
class Rollout:
    """One episode: the policy's turns after one prompt. A response to a verifier is one turn.

    `response_ids` holds every token that the policy sampled, the end token included when
    `finish_reason` is STOP; `rollout_logprobs` has one entry for each of them, under the
    distribution that was sampled from. `response_text` is their text without the end token.

    The tokens of the `turns` follow each other in `response_ids` as the engine read them. They
    include the environment's tokens, whose log-probs are 0. Only an episode whose environment
    failed before the first turn has no turns.

    `is_correct` is used by the positive-example LM loss and the accuracies; None: not judged yet.
    `extracted` is the answer that a verifier read. `by_verifier` has the verdicts of several
    verifiers by their names, and is empty with one. `in_environment` says whether an environment
    answered the turns; otherwise a verifier judges the one turn. `failure` names why environment or
    verifier failed (timeout, crash, garbled, ...): without a verdict a response counts as
    incorrect. A rollout that `is_lost` cannot be trained on, because its environment failed and its
    reward is unknown.
    """

    prompt: Prompt
    response_ids: tuple[int, ...]
    response_text: str
    rollout_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    turns: tuple[Turn, ...] = ()
    is_correct: bool | None = None
    extracted: str | None = None
    failure: str | None = None
    by_verifier: Mapping[str, VerifierVerdict] = field(default_factory=dict)
    in_environment: bool = False
    is_lost: bool = False

    @property
    def reward(self) -> float:
        """The sum of the turns' rewards, without shaping."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def version(self) -> int | None:
        """The number of weight updates before the first turn; None: not counted, or no turn."""
        return self.turns[0].version if self.turns else None

    @property
    def turn_spans(self) -> list[TurnSpan]:
        """The positions in `response_ids` of each turn's tokens."""
        ends = list(accumulate(turn.num_observed + turn.num_sampled for turn in self.turns))
        firsts = [end - turn.num_sampled for turn, end in zip(self.turns, ends, strict=True)]
        return list(map(TurnSpan, (0, *ends), firsts, ends))

    @property
    def is_sampled(self) -> tuple[bool, ...]:
        """Whether the policy sampled each token of `response_ids`."""
        parts = ((False,) * turn.num_observed + (True,) * turn.num_sampled for turn in self.turns)
        return tuple(is_sampled for part in parts for is_sampled in part)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(turn.num_sampled for turn in self.turns)


class PromptScore(NamedTuple):
    """How many of the responses to a prompt are correct; `prompt` is a digest of the prompt."""

    prompt: str
    num_correct: int
    num_responses: int


@dataclass(frozen=True)
class RolloutBatch:
    """All judged rollouts of one iteration with their rewards, response-aligned.

    Rows of a group are contiguous. Column t belongs to response token t. `response_mask` marks the
    tokens that the policy sampled, `loss_mask` those that carry policy loss, and `value_mask` those
    that carry value loss. `turn_rewards` has each turn's reward on its last sampled token.
    `turn_starts` marks the first sampled token of each turn. `is_lost` marks episodes whose
    environment failed. `is_filler` marks rows without loss, which keep the batch's size where
    dynamic sampling found too few. `unshaped_rewards` are sums over turns; `rewards` also contain
    the overlong punishment.

    The other fields are None if the system does not need them. `baseline_rewards` has the reward of
    the greedy response to the row's prompt. `step_starts` marks the first token of each step of
    VinePPO. `step_values` has a value on every token: what continuations from the start of its step
    earned, what other responses with the same numbers in them earned, or what OPPO's evidence says.
    In stored rollouts whose prefixes were continued, `measured_values` has the mean return of the
    continuations at the first token after such a prefix, and `measured_draws` how many of them
    count for the row; both are 0 elsewhere. `actor_states` is for a critic without a network, or
    for the advantage estimator. For each row it has the actor's states before the sampled tokens,
    [num sampled tokens, L, H], without padding; for POISE only the first and a few last ones.
    `sampled_groups` has the score of each group that was sampled for the batch, also of those that
    dynamic sampling has dropped. It is empty for stored rollouts.

    Each later stage returns a batch of its own type, with the columns that it adds. A new column
    must be a field of the type whose stage computes it, because rows and micro-batches are cut from
    all fields.
    """

    rollouts: list[Rollout]
    response_ids: Int[Tensor, "B T"]
    response_mask: Bool[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    value_mask: Bool[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    turn_rewards: Float[Tensor, "B T"]
    turn_starts: Bool[Tensor, "B T"]
    rewards: Float[Tensor, " B"]
    unshaped_rewards: Float[Tensor, " B"]
    is_correct: Bool[Tensor, " B"]
    is_lost: Bool[Tensor, " B"]
    is_filler: Bool[Tensor, " B"]
    group_size: int
    max_response_tokens: int
    baseline_rewards: Float[Tensor, " B"] | None = None
    step_starts: Bool[Tensor, "B T"] | None = None
    step_values: Float[Tensor, "B T"] | None = None
    measured_values: Float[Tensor, "B T"] | None = None
    measured_draws: Float[Tensor, "B T"] | None = None
    actor_states: list[Tensor] | None = None
    sampled_groups: tuple[PromptScore, ...] = ()

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def response_lengths(self) -> Int[Tensor, " B"]:
        """The number of tokens that the policy sampled in each row, without observed tokens."""
        return self.response_mask.sum(dim=1)

    @property
    def counted_mask(self) -> Bool[Tensor, "B T"]:
        """A mask of the tokens in a batch's means and variances: sampled, not of filler rows."""
        return self.response_mask & ~self.is_filler[:, None]

    @property
    def is_truncated(self) -> Bool[Tensor, " B"]:
        """Whether each response ended without `FinishReason.STOP`."""
        return torch.tensor([r.finish_reason is not FinishReason.STOP for r in self.rollouts])


@dataclass(frozen=True)
class EvaluatedBatch(RolloutBatch):
    """A rollout batch with the networks' log-probs and values of each token before the update.

    `old_values[:, t]` is V(s_t), the value of the state in which token t is sampled. Log-probs
    are None while the policy is not trained, `ref_logprobs` without a KL term, values without a
    critic, `old_entropy` where no value page shows it and POISE does not read it.

    For OTB `old_collisions` has the sum over the vocabulary of the squared probabilities. For OPPO
    `answer_logprobs` has the log-probs of the tokens after the prompt with the answer.

    With several critics `old_values` is their mean and `value_spread` their standard deviation.
    `critic_members` says which critic trains on the row, and `old_member_values` has its values.

    With `critic.target` residual `value_offsets` has the part of the value that the critic does not
    predict. Both columns of values are then the critic's outputs plus this offset.
    """

    old_logprobs: Float[Tensor, "B T"] | None = None
    ref_logprobs: Float[Tensor, "B T"] | None = None
    old_values: Float[Tensor, "B T"] | None = None
    old_entropy: Float[Tensor, "B T"] | None = None
    value_spread: Float[Tensor, "B T"] | None = None
    critic_members: Int[Tensor, " B"] | None = None
    old_member_values: Float[Tensor, "B T"] | None = None
    old_collisions: Float[Tensor, "B T"] | None = None
    answer_logprobs: Float[Tensor, "B T"] | None = None
    value_offsets: Float[Tensor, "B T"] | None = None

    @property
    def values(self) -> Float[Tensor, "B T"]:
        """`old_values`, which must not be None: the system must have a critic."""
        assert self.old_values is not None, "a critic is trained"
        return self.old_values


@dataclass(frozen=True)
class TrainingBatch(EvaluatedBatch):
    """An evaluated batch with everything that the losses need.

    `token_rewards` has the response's reward and the KL penalty on tokens, and `value_rewards` the
    rewards of the value targets. `raw_advantages` are the advantages before whitening.
    `importance_weights` multiply the tokens' policy losses, and `value_weights` the responses'
    value losses. `value_draws` says how many returns are averaged in a token's value target; the
    value loss is a mean over returns. `policy_mask` marks the tokens of `loss_mask` that carry
    policy loss, and `entropy_mask` those that carry the entropy bonus. Advantages are None while
    the policy is not trained, and targets are None without a critic. `policy_lambdas` are the
    lambdas of advantages that GAE made. `baseline_values` are the values from which advantages were
    computed, if they are not the critic's.
    """

    token_rewards: Float[Tensor, "B T"] = field(kw_only=True)
    value_rewards: Float[Tensor, "B T"] = field(kw_only=True)
    policy_mask: Bool[Tensor, "B T"] = field(kw_only=True)
    entropy_mask: Bool[Tensor, "B T"] = field(kw_only=True)
    importance_weights: Float[Tensor, "B T"] = field(kw_only=True)
    value_weights: Float[Tensor, " B"] = field(kw_only=True)
    value_draws: Float[Tensor, "B T"] = field(kw_only=True)
    raw_advantages: Float[Tensor, "B T"] | None = None
    advantages: Float[Tensor, "B T"] | None = None
    value_targets: Float[Tensor, "B T"] | None = None
    policy_lambdas: Float[Tensor, " B"] | None = None
    baseline_values: Float[Tensor, "B T"] | None = None
