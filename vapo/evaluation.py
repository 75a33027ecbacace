"""Held-out evaluation: k sampled responses per prompt -> avg@k, pass@k, maj@k.

Each rank takes every world_size-th prompt. Every rank computes the metrics over all of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.config.schema import EvaluationConfig
from vapo.errors import UserError
from vapo.intervals import MIN_PROMPTS, share_interval, t_interval
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.player import RolloutRunner
from vapo.rollouts.segments import shown_turns, shows_turns
from vapo.system.distributed import rank, sum_over_ranks, world_size
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.types import FinishReason, Prompt, Rollout


@dataclass(frozen=True)
class EvaluationResult:
    """The metrics over all ranks, and this rank's responses.

    `rows` is a table of sample responses: the first response to each prompt, then the second ones,
    and so on. `rollouts` are in contiguous groups of k.
    """

    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    rollouts: list[Rollout]
    k: int

    @property
    def prompts(self) -> list[Prompt]:
        return [rollout.prompt for rollout in self.rollouts[:: self.k]]


def clustered_mean(prompt_means: Float[Tensor, " N"]) -> dict[str, float]:
    """Return the mean over all ranks' prompts of each prompt's mean, with a 95 % interval.

    Every rank must call this. The k responses to a prompt are not independent: a hard prompt fails
    all of them. So the sample is the prompts: standard error = std of the prompts' means (unbiased)
    / sqrt(N), interval = mean +- t(0.975, N - 1) * standard error, clipped to [0, 1]. It is [0, 1]
    for fewer than 4 prompts. If every response is wrong, or every one right, no spread can be
    estimated: it is Wilson's interval of N prompts, all of which failed or succeeded.
    Sources: Miller 2024 (arXiv 2411.00640), clustered standard errors, for clusters of one size;
    Wilson 1927.
    """
    means = prompt_means.double()
    sums = torch.stack([means.sum(), means.square().sum(), torch.ones_like(means).sum()])
    return mean_of_sums(sum_over_ranks(sums))


def mean_of_sums(sums: Float[Tensor, " sums"]) -> dict[str, float]:
    """Return a mean over prompts with its 95 % interval and the number of prompts.

    `sums` are the sum, the sum of squares and the number of the prompts' means. The interval is
    Student's, clipped to [0, 1]; it is Wilson's if every mean is 0, or every one 1.
    """
    total, total_squares, num = sums.unbind()
    mean = total / num
    variance = (total_squares - num * mean.square()).clamp(min=0) / (num - 1)
    if num >= MIN_PROMPTS and mean in (0, 1):
        limits = share_interval(int(total), int(num))
    else:
        limits = t_interval(float(mean), float((variance / num).sqrt()), int(num))
    low, high = mean.new_tensor(limits).clamp(0, 1).tolist()
    return {"mean": float(mean), "ci_low": low, "ci_high": high, "num_prompts": float(num)}


def mean_of_all(numbers: Sequence[float] | Tensor) -> float:
    """Return the mean of the numbers of all ranks. Every rank must call this."""
    local = torch.as_tensor(numbers, dtype=torch.float64)
    total, num = sum_over_ranks(torch.stack([local.sum(), torch.ones_like(local).sum()])).unbind()
    return float(total / num)


def majority_is_correct(rollouts: Sequence[Rollout], votes: Sequence[int | None]) -> bool:
    """Whether a vote over the answers elects a correct one.

    Equal `votes` are for the same answer. A tie goes to the answer that comes first. Responses
    without an answer vote for None, which is never correct. The elected answer is as correct as the
    first response with it.
    """
    counts = Counter(votes)
    elected = max(counts, key=lambda answer: counts[answer])  # a tie: the answer that comes first
    return elected is not None and bool(rollouts[votes.index(elected)].is_correct)


def evaluation_settings(config: EvaluationConfig, max_response_tokens: int) -> SamplingSettings:
    """Return the sampling settings of held-out responses.

    `max_response_tokens`, the training budget, applies if the config has none.
    """
    return SamplingSettings(
        max_response_tokens=config.max_response_tokens or max_response_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )


def evaluate(
    prompts: Sequence[Prompt],
    *,
    player: RolloutRunner,
    config: EvaluationConfig,
    max_response_tokens: int,
    progress: Progress,
) -> EvaluationResult:
    """Sample k responses to each held-out prompt by the evaluation's own settings, and score.

    The seed is `evaluation.seed`, so that every evaluation draws the same random numbers.
    `max_response_tokens` is the training budget, which applies if the config sets none. Every rank
    must call this, with the same prompts. Sources of a mixture also have metrics of their own, as
    `eval_NAME/...`.

    Raises:
        UserError: there are no prompts.
    """
    prompts = prompts[: config.num_prompts]
    if not prompts:
        raise UserError("data.heldout: no prompts to evaluate on")
    # for the sources of all ranks' prompts, so that every rank computes the same metrics
    can_vote = {p.source: player.scorer.extracts_answers(p.source) for p in prompts}
    prompts = prompts[rank() :: world_size()]
    settings = evaluation_settings(config, max_response_tokens)
    total = len(prompts) * config.k
    with progress.stage("evaluation", total=total, unit="responses") as advance:
        rollouts = player.play(
            prompts,
            group_size=config.k,
            settings=settings,
            seed=derive_seed(config.seed, "evaluation", rank()),
            advance=advance,
        )
        votes = None
        if any(can_vote.values()):
            votes = player.scorer.votes(rollouts, group_size=config.k)
    keeps_special = player.config.rewards.keep_special_tokens
    table = _table(rollouts, config.k, player.tokenizer, keeps_special=keeps_special)
    return EvaluationResult(
        _metrics_by_source(rollouts, votes, can_vote, config.k),
        table[: config.num_table_rows],
        rollouts,
        config.k,
    )


def _metrics_by_source(
    rollouts: Sequence[Rollout],
    votes: Sequence[int | None] | None,
    can_vote: Mapping[str, bool],
    k: int,
) -> dict[str, float]:
    """Return the metrics of all prompts, and of each source that has a name.

    `can_vote` says of every source of all ranks' prompts whether its responses have answers to vote
    on. The maj@k of all prompts needs votes of all sources.
    """
    metrics = _metrics(rollouts, votes if all(can_vote.values()) else None, k)
    for source in sorted(can_vote.keys() - {""}):
        rows = [i for i, rollout in enumerate(rollouts) if rollout.prompt.source == source]
        source_votes = [votes[i] for i in rows] if votes is not None and can_vote[source] else None
        source_metrics = _metrics([rollouts[i] for i in rows], source_votes, k)
        metrics |= {key.replace("eval/", f"eval_{source}/"): v for key, v in source_metrics.items()}
    return metrics


def _metrics(
    rollouts: Sequence[Rollout], votes: Sequence[int | None] | None, k: int
) -> dict[str, float]:
    """Return the metrics over all ranks' prompts and responses; groups of k are contiguous.

    avg@k: mean accuracy of a response. pass@k: share of prompts with any correct response. maj@k:
    share of prompts whose most frequent answer is correct; left out without votes.
    """
    is_correct = torch.tensor([float(bool(r.is_correct)) for r in rollouts]).view(-1, k)
    score = clustered_mean(is_correct.double().mean(dim=1))
    majority = {}
    if votes is not None:
        groups = [slice(first, first + k) for first in range(0, len(rollouts), k)]
        elected = [float(majority_is_correct(rollouts[g], votes[g])) for g in groups]
        majority["eval/maj_at_k"] = mean_of_all(elected)
    is_cut = [r.finish_reason is not FinishReason.STOP and not r.is_lost for r in rollouts]
    return {
        "eval/avg_at_k": score["mean"],
        "eval/avg_at_k_ci_low": score["ci_low"],
        "eval/avg_at_k_ci_high": score["ci_high"],
        "eval/pass_at_k": mean_of_all(is_correct.amax(dim=1)),
        **majority,
        "eval/response_length_mean": mean_of_all([rollout.num_sampled for rollout in rollouts]),
        "eval/truncation_rate": mean_of_all(is_cut),
        "eval/failure_rate": mean_of_all([r.failure is not None for r in rollouts]),
        "eval/num_prompts": score["num_prompts"],
    }


def _table(
    rollouts: Sequence[Rollout],
    k: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    keeps_special: bool = True,
) -> list[dict[str, Any]]:
    """Return a table with a row for each response.

    It begins with every prompt's first response, then has every prompt's second one, and so on.
    """
    rows = []
    for i in (first + j for j in range(k) for first in range(0, len(rollouts), k)):
        rollout = rollouts[i]
        judged = "correct" if rollout.is_correct else "incorrect"
        failure, reward = rollout.failure, rollout.reward
        rows.append(
            {
                "prompt": rollout.prompt.text,
                "answer": rollout.prompt.answer,
                "response": rollout.response_text,
                "extracted": rollout.extracted,
                "verdict": judged if failure is None else f"failed: {failure}",
                "reward": reward if math.isfinite(reward) else None,
                "length": rollout.num_sampled,
                "finish_reason": str(rollout.finish_reason),
                "k": i % k,
                **_turn_columns(rollout, tokenizer, keeps_special=keeps_special),
            }
        )
    return rows


def _turn_columns(
    rollout: Rollout, tokenizer: PreTrainedTokenizerBase, *, keeps_special: bool
) -> dict[str, Any]:
    """Return the table's columns for an episode: its turns as text, their number and rewards.

    The result is empty for a response that is not shown in turns.
    """
    if not shows_turns(rollout):
        return {}
    rewards = json.dumps([turn.reward for turn in rollout.turns])
    text = shown_turns(rollout, tokenizer, keeps_special=keeps_special)
    return {"response": text, "num_turns": len(rollout.turns), "turn_rewards": rewards}
