"""Makes the batch of judged rollouts, and computes the metrics of how it was sampled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from vapo.config import FitConfig
from vapo.config.rewards import SeveralVerifiers
from vapo.config.schema import RewardConfig
from vapo.prompts.training_set import TrainingSet
from vapo.rewards.overlong import soft_overlong_punishment
from vapo.system.distributed import gather_over_ranks, max_over_ranks, sum_over_ranks
from vapo.types import FinishReason, Prompt, PromptScore, Rollout, RolloutBatch


def make_rollout_batch(
    rollouts: Sequence[Rollout],
    *,
    group_size: int,
    rewards: RewardConfig,
    max_response_tokens: int,
    critic_truncated: Literal["as_policy", "train", "leave_out"] = "as_policy",
) -> RolloutBatch:
    """Make the batch of judged rollouts: pad responses into tensors, and shape their rewards.

    A reward is the verifiers' or the environment's, less the punishment of an overlong response if
    the config has one.

    Args:
        critic_truncated: whether truncated responses carry value loss (`critic.truncated`).

    Raises: ValueError: a rollout has no response token, or no verdict.
    """
    if any(rollout.is_correct is None for rollout in rollouts):
        raise ValueError("a rollout has no verdict")
    is_lost = torch.tensor([rollout.is_lost for rollout in rollouts])
    lengths = torch.tensor([rollout.num_sampled for rollout in rollouts])
    if bool(((lengths == 0) & ~is_lost).any()):
        raise ValueError("a rollout has no response token: the sampler must return at least one")
    widths = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
    is_token = torch.arange(max(1, int(widths.max()))) < widths[:, None]
    response_ids = _on_tokens(is_token, [r.response_ids for r in rollouts], torch.long)
    logprobs = _on_tokens(is_token, [r.rollout_logprobs for r in rollouts], torch.float32)
    response_mask = _on_tokens(is_token, [r.is_sampled for r in rollouts], torch.bool)
    turns = turn_columns(rollouts, response_mask)
    unshaped_rewards = reward = turns["turn_rewards"].sum(dim=1)  # in float32, as everywhere
    if rewards.overlong.soft_punishment:
        reward = reward + soft_overlong_punishment(
            lengths,
            max_response_tokens=max_response_tokens,
            cache_tokens=rewards.overlong.ramp_tokens(max_response_tokens),
        )
    finished = torch.tensor([r.finish_reason is FinishReason.STOP for r in rollouts])
    is_finished = response_mask & finished[:, None]
    loss_mask = is_finished if rewards.overlong.filter_truncated else response_mask
    value_masks = {"as_policy": loss_mask, "train": response_mask, "leave_out": is_finished}
    return RolloutBatch(
        rollouts=list(rollouts),
        response_ids=response_ids,
        response_mask=response_mask,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        rewards=reward,
        is_correct=torch.tensor([rollout.is_correct for rollout in rollouts]),
        is_lost=is_lost,
        is_filler=torch.zeros_like(is_lost),
        group_size=group_size,
        max_response_tokens=max_response_tokens,
        unshaped_rewards=unshaped_rewards,
        value_mask=value_masks[critic_truncated],
        turn_rewards=turns["turn_rewards"],
        turn_starts=turns["turn_starts"],
    )


def configured_batch(
    rollouts: Sequence[Rollout], config: FitConfig, *, group_size: int
) -> RolloutBatch:
    """Make the batch of judged rollouts as the config's training does (`make_rollout_batch`)."""
    return make_rollout_batch(
        rollouts,
        group_size=group_size,
        rewards=config.rewards,
        max_response_tokens=config.rollouts.max_response_tokens,
        critic_truncated=config.critic.truncated,
    )


def prompt_scores(groups: Iterable[Sequence[Rollout]]) -> tuple[PromptScore, ...]:
    """Return for each group of responses to one prompt their number, and how many are correct.

    A response without a verdict counts as wrong, and so does an episode whose environment failed.
    """
    return tuple(
        PromptScore(
            prompt_digest(group[0].prompt),
            sum(bool(rollout.is_correct) for rollout in group),
            len(group),
        )
        for group in groups
    )


def prompt_digest(prompt: Prompt) -> str:
    """Return twelve hexadecimal digits that identify a problem in all runs.

    They are a digest of its row, before any template, and of its reference answer.
    """
    problem = json.dumps([prompt.columns, prompt.answer], default=str)
    return hashlib.blake2b(problem.encode("utf-8", "replace"), digest_size=6).hexdigest()


def _on_tokens(
    is_token: Bool[Tensor, "B T"], rows: Sequence[Sequence[float]], dtype: torch.dtype
) -> Tensor:
    """Return a [B, T] tensor with the numbers of `rows` at the tokens, and 0 elsewhere.

    Each row has one number for each of its tokens.
    """
    column = torch.zeros(is_token.shape, dtype=dtype)
    column[is_token] = torch.tensor([x for row in rows for x in row], dtype=dtype)
    return column


def turn_columns(
    rollouts: Sequence[Rollout], response_mask: Bool[Tensor, "B T"]
) -> dict[str, Tensor]:
    """Return the batch columns `turn_rewards` and `turn_starts`, both [B, T].

    `turn_rewards` has each turn's reward on its last sampled token, and `turn_starts` marks each
    turn's first sampled token.

    Raises: ValueError: a turn has a reward, and no sampled token to put it on.
    """
    rewards = torch.zeros(response_mask.shape)
    starts = torch.zeros_like(response_mask)
    for row, rollout in enumerate(rollouts):
        for turn, span in zip(rollout.turns, rollout.turn_spans, strict=True):
            if turn.num_sampled:
                starts[row, span.first], rewards[row, span.end - 1] = True, turn.reward
            elif turn.reward:
                raise ValueError(f"a turn of row {row} has a reward, and no token was sampled")
    return {"turn_rewards": rewards, "turn_starts": starts}


def source_metrics(
    batch: RolloutBatch, training: TrainingSet, *, iteration: int
) -> dict[str, float]:
    """Return metrics `source_NAME/...` for every source of a mixture of data sets, over all ranks.

    Without a mixture there is only `rollout/curriculum_stage`, if the data has a curriculum. Every
    rank must call this.
    """
    metrics: dict[str, float] = {}
    for source in training.sources:
        if len(source.stages) > 1:
            group = f"source_{source.name}" if source.name else "rollout"
            metrics[f"{group}/curriculum_stage"] = float(source.stage_at(iteration))
    names = [source.name for source in training.sources if source.name]
    if not names:
        return metrics
    columns = torch.stack(
        [
            torch.tensor([names.index(r.prompt.source) for r in batch.rollouts]).double(),
            batch.is_correct.double(),
            batch.rewards.double(),
            batch.response_lengths.double(),
        ],
        dim=1,
    )
    rows = gather_over_ranks(columns)
    for index, name in enumerate(names):
        source_rows = rows[rows[:, 0] == index]
        metrics[f"source_{name}/num_prompts"] = len(source_rows) / batch.group_size
        if len(source_rows):
            _, accuracy, reward, length = source_rows.mean(dim=0).tolist()
            metrics[f"source_{name}/accuracy"] = accuracy
            metrics[f"source_{name}/reward_mean"] = reward
            metrics[f"source_{name}/response_length_mean"] = length
    return metrics


def verifier_metrics(batch: RolloutBatch, rewards: RewardConfig) -> dict[str, float]:
    """Return metrics `verifier_NAME/...` for each of several verifiers, over all ranks.

    They are empty if the config has one verifier. The verdicts of a data source that has a verifier
    of its own are left out. Every rank must call this.
    """
    if not isinstance(rewards, SeveralVerifiers):
        return {}
    metrics: dict[str, float] = {}
    for name in rewards.verifiers:
        verdicts = [r.by_verifier[name] for r in batch.rollouts if name in r.by_verifier]
        sums = torch.tensor(
            [
                sum(verdict["reward"] for verdict in verdicts),
                sum(verdict["is_correct"] for verdict in verdicts),
                sum(verdict["failure"] is not None for verdict in verdicts),
                len(verdicts),
            ],
            dtype=torch.float64,
        )
        reward, num_correct, num_failed, num = sum_over_ranks(sums).tolist()
        metrics[f"verifier_{name}/failures"] = num_failed
        if num:
            metrics[f"verifier_{name}/reward_mean"] = reward / num
            metrics[f"verifier_{name}/accuracy"] = num_correct / num
    return metrics


def staleness_metrics(batch: RolloutBatch, policy_iterations: int) -> dict[str, float]:
    """Return metrics of how many policy iterations the weights that sampled tokens are behind.

    They are the largest and the mean age of the batch's sampled tokens over all ranks. A token has
    the age of the weights that sampled it if the engine names them, else of the weights at its
    turn's request. If updates are not counted, the age is 0: the actor's current weights sampled
    the token.

    Args:
        policy_iterations: the number of policy iterations before this one.
    """
    ages: list[float] = [0.0]  # so that the largest age of no tokens is 0
    tokens: list[int] = [0]
    for rollout in batch.rollouts:
        for turn in rollout.turns:
            for version, num_tokens in turn.versions or [(policy_iterations, turn.num_sampled)]:
                # the push that ends value pretraining is an update, but no policy iteration
                ages.append(max(0.0, float(policy_iterations - version)))
                tokens.append(num_tokens)
    age, count = torch.tensor(ages).double(), torch.tensor(tokens).double()
    total, num = sum_over_ranks(torch.stack([(age * count).sum(), count.sum()])).tolist()
    return {
        "rollout/staleness_max": float(max_over_ranks(age.max())),
        "rollout/staleness_mean": total / num if num else 0.0,
    }
