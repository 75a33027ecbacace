"""Measure the start policy itself, before anything is trained.

This includes the worth of a guess: the reward of a response that is made to answer at its middle.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from vapo.advantages.credit import num_gae_steps, policy_lambda
from vapo.config import FitConfig, resolve
from vapo.diagnostics.value_page.heldout import heldout_batch
from vapo.errors import UserError
from vapo.functional.metrics import first_token_reward_weight
from vapo.rollouts.collection import sample_and_score
from vapo.rollouts.engines.contract import SamplingSettings, sampled_text, sampling_settings
from vapo.rollouts.player import RolloutRunner
from vapo.studies.gates.rules import Interval, clustered_interval
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.types import Prompt, Rollout, RolloutBatch, Turn

_ANSWER_TOKENS = 16  # most tokens of a guess


@dataclass(frozen=True)
class StartPolicy:
    """The start policy's held-out rollouts, and the mean reward of guesses at their middle.

    `guess` is None if no guesses were sampled.
    """

    batch: RolloutBatch
    guess: Interval | None

    @property
    def mean_reward(self) -> float:
        return statistics.fmean(rollout.reward for rollout in self.batch.rollouts)

    @property
    def mean_length(self) -> float:
        return float(self.batch.response_lengths.double().mean())


def sample_start(
    config: FitConfig,
    prompts: Sequence[Prompt],
    player: RolloutRunner,
    progress: Progress,
    *,
    answer_ids: tuple[int, ...] | None,
) -> StartPolicy:
    """Sample `evaluation.k` responses to each held-out prompt, and judge them.

    Args:
        player: samples and judges, with the sampling settings of training.
        answer_ids: the tokens that make the policy answer. With them a guess is sampled at the
            middle of each response, and judged. None leaves guesses out.
    """
    k, settings, guess = config.evaluation.k, sampling_settings(config.rollouts), None
    rollouts = sample_and_score(
        prompts,
        player,
        progress.stage,
        group_size=k,
        settings=settings,
        seed=derive_seed(config.seed, "held-out rollouts of gates"),
    )
    if answer_ids is not None:
        with progress.stage("guesses", total=len(rollouts), unit="responses") as advance:
            guesses = answer_at_middle(
                rollouts,
                answer_ids,
                player=player,
                settings=settings,
                seed=derive_seed(config.seed, "guesses of gates"),
                advance=advance,
            )
        rewards = [rollout.reward for rollout in guesses]
        groups = [rewards[first : first + k] for first in range(0, len(rewards), k)]
        guess = clustered_interval([statistics.fmean(group) for group in groups])
    return StartPolicy(heldout_batch(config, rollouts), guess)


def answer_token_ids(
    text: str, tokenizer: PreTrainedTokenizerBase, *, max_response_tokens: int
) -> tuple[int, ...]:
    """Return the token ids of the text that makes a policy answer, as ';'.

    Raises: UserError: the text has no tokens, these decode to another text (spaces around it
        aside), or half of the response budget has no room for them and an answer.
    """
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    decoded = sampled_text(ids, tokenizer)
    if not ids or decoded.strip() != text.strip():
        raise UserError(
            f"--answer_now {text!r}: the tokenizer of actor.path writes it as {decoded!r}; give a "
            "text that begins the answer of a response, as ';' on the tasks of conf/"
        )
    if max_response_tokens // 2 + len(ids) >= max_response_tokens:
        raise UserError(
            f"--answer_now {text!r} has {len(ids)} tokens, which half of "
            f"rollouts.max_response_tokens ({max_response_tokens}) has no room for"
        )
    return ids


def middle_place(rollout: Rollout) -> int:
    """Return the index of a response's middle token."""
    return len(rollout.response_ids) // 2


def answer_at_middle(
    rollouts: Sequence[Rollout],
    answer_ids: tuple[int, ...],
    *,
    player: RolloutRunner,
    settings: SamplingSettings,
    seed: int,
    advance: Callable[[int], None] = lambda n: None,
) -> list[Rollout]:
    """Cut each response before its middle token, make it answer there, and judge it.

    Return the judged responses. The engine continues from `answer_ids` for up to 16 tokens. All
    responses get as many as the longest one has room for within the response budget.
    """
    starts = [(*r.response_ids[: middle_place(r)], *answer_ids) for r in rollouts]
    room = min(_ANSWER_TOKENS, settings.max_response_tokens - max(map(len, starts)))
    return player.play(
        [
            replace(
                rollout,
                prompt=replace(rollout.prompt, max_response_tokens=len(start) + room),
                response_ids=start,
                rollout_logprobs=(0.0,) * len(start),
                turns=(Turn(0, len(start)),),
            )
            for rollout, start in zip(rollouts, starts, strict=True)
        ],
        group_size=1,
        settings=settings,
        seed=seed,
        advance=advance,
    )


def mean_weight_and_horizon(
    config: FitConfig, batch: RolloutBatch, *, adaptive: bool
) -> tuple[float, float]:
    """Return the reward's weight at the first token and the horizon, 1 / (1 - lambda) in tokens.

    Both are means over responses.

    Args:
        adaptive: True takes the length-adaptive lambda as configured, even if the component is off.
            False takes `algorithm.lambda_policy`.
    """
    length_adaptive = replace(config.components.length_adaptive_gae, enabled=adaptive)
    components = replace(config.components, length_adaptive_gae=length_adaptive)
    numbers = resolve(replace(config, components=components))
    lambdas = torch.as_tensor(policy_lambda(batch, numbers), dtype=torch.float64)
    column = lambdas.reshape(-1, 1).expand(len(batch), 1)
    weights = first_token_reward_weight(num_gae_steps(batch, numbers), numbers.gamma * column)
    return float(weights.double().mean()), float((1 / (1 - column)).mean())
