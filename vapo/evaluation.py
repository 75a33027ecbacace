"""Held-out evaluation: k sampled responses per prompt -> avg@k, pass@k, maj@k.

With several ranks each takes every world_size-th prompt; the metrics are over all of them, on
every rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch

from vapo.config.schema import EvaluationConfig
from vapo.errors import UserError
from vapo.rewards.scorer import Scorer
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.system.distributed import rank, sum_over_ranks, world_size
from vapo.system.progress import Progress
from vapo.system.seeding import derive_seed
from vapo.types import FinishReason, Prompt, Rollout, Verdict

_MIN_PROMPTS = 4  # fewer are too few to estimate the spread between prompts


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class EvaluationResult:
    """`rows`: a table of sample responses, the first response of each prompt first.

    `rollouts` and `verdicts` are all of this rank, groups of k contiguous.
    """

    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    rollouts: list[Rollout]
    verdicts: list[Verdict]
    k: int

    @property
    def prompts(self) -> list[Prompt]:
        return [rollout.prompt for rollout in self.rollouts[:: self.k]]


def clustered_interval(total: float, total_squares: float, num_prompts: int) -> Interval:
    """Mean over prompts of each prompt's mean, with a 95 % interval that respects the clusters.

    The k responses of a prompt are not independent: a hard prompt fails all of them. So the
    sample is the prompts: standard error = std of the prompts' means (unbiased) / sqrt(N),
    interval = mean +- t(0.975, N - 1) * standard error, clipped to [0, 1]. It is [0, 1] for
    fewer than 4 prompts, and has no width when all prompts have the same score. The arguments
    are sums over the prompts, of their means and of the squares of these.
    Source: Miller 2024 (arXiv 2411.00640), clustered standard errors, for clusters of one size.
    """
    mean = total / num_prompts
    if num_prompts < _MIN_PROMPTS:
        return Interval(mean, 0.0, 1.0)
    variance = max(total_squares - num_prompts * (mean * mean), 0.0) / (num_prompts - 1)
    half_width = t_quantile(0.975, num_prompts - 1) * math.sqrt(variance / num_prompts)
    return Interval(mean, max(mean - half_width, 0.0), min(mean + half_width, 1.0))


def majority_is_correct(verdicts: Sequence[Verdict], votes: Sequence[int | None]) -> bool:
    """Whether a vote over the answers elects a correct one.

    Equal `votes` are for the same answer. A tie goes to the answer seen first. Responses without
    an answer vote together for None, which is never correct. The elected answer is as correct as
    the first response that gave it.
    """
    counts = Counter(votes)
    elected = max(counts, key=lambda answer: counts[answer])  # the first of equals: seen first
    return elected is not None and verdicts[votes.index(elected)].is_correct


def t_quantile(probability: float, degrees: int) -> float:
    """Student's t by the Cornish-Fisher expansion: within 1 % for 3 degrees, better above.

    Source: Abramowitz and Stegun 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def evaluate(
    prompts: Sequence[Prompt],
    *,
    sampler: Sampler,
    scorer: Scorer,
    config: EvaluationConfig,
    max_response_tokens: int,
    progress: Progress,
) -> EvaluationResult:
    """Sample k responses to each held-out prompt by the evaluation's own settings, and score.

    The seed is the config's own, so that every evaluation draws the same random numbers.
    `max_response_tokens` is the training budget, used when the config sets none. Every rank
    must call this, with the same prompts. Sources of a mixture have the metrics of their own
    prompts too, as `eval_NAME/...`.

    Raises:
        UserError: there are no prompts.
    """
    prompts = prompts[: config.num_prompts]
    if not prompts:
        raise UserError("data.heldout: no prompts to evaluate on")
    # of all ranks' prompts, so that every rank computes the same metrics
    can_vote = {p.source: scorer.extracts_answers(p.source) for p in prompts}
    sources = sorted(can_vote.keys() - {""})
    prompts = prompts[rank() :: world_size()]
    settings = SamplingSettings(
        max_response_tokens=config.max_response_tokens or max_response_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )
    total = len(prompts) * config.k
    with progress.stage("evaluation", total=total, unit="responses") as advance:
        rollouts = sampler.sample(
            prompts,
            group_size=config.k,
            settings=settings,
            seed=derive_seed(config.seed, "evaluation", rank()),
            advance=advance,
        )
        with progress.stage("scoring", total=total, unit="responses") as advance_scoring:
            verdicts = scorer.score(rollouts, advance=advance_scoring)
            votes = None
            if any(can_vote.values()):
                votes = scorer.votes(rollouts, verdicts, group_size=config.k)
    metrics = _metrics(rollouts, verdicts, votes if all(can_vote.values()) else None, config.k)
    for source in sources:
        rows = [i for i, rollout in enumerate(rollouts) if rollout.prompt.source == source]
        of_source = _metrics(
            [rollouts[i] for i in rows],
            [verdicts[i] for i in rows],
            [votes[i] for i in rows] if votes is not None and can_vote[source] else None,
            config.k,
        )
        metrics |= {key.replace("eval/", f"eval_{source}/"): v for key, v in of_source.items()}
    return EvaluationResult(
        metrics,
        _table(rollouts, verdicts, config.k)[: config.num_table_rows],
        rollouts,
        verdicts,
        config.k,
    )


def _metrics(
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
    votes: Sequence[int | None] | None,
    k: int,
) -> dict[str, float]:
    """Compute the metrics over all ranks' prompts and responses; groups of k are contiguous.

    avg@k: mean accuracy of a response. pass@k: share of prompts with any correct response.
    maj@k: share of prompts whose most frequent answer is correct; left out without votes.
    """
    is_correct = torch.tensor([v.is_correct for v in verdicts], dtype=torch.float64).view(-1, k)
    means = is_correct.mean(dim=1)
    num_elected = 0
    if votes is not None:
        groups = [slice(first, first + k) for first in range(0, len(verdicts), k)]
        num_elected = sum(majority_is_correct(verdicts[g], votes[g]) for g in groups)
    sums = [
        float(means.sum()),
        float(means.square().sum()),
        float(is_correct.amax(dim=1).sum()),
        num_elected,
        sum(len(rollout.response_ids) for rollout in rollouts),
        sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts),
        len(means),
    ]
    total, squares, passed, elected, length, truncated, num_prompts = sum_over_ranks(
        torch.tensor(sums, dtype=torch.float64)
    ).tolist()
    score = clustered_interval(total, squares, int(num_prompts))
    majority = {} if votes is None else {"eval/maj_at_k": elected / num_prompts}
    return {
        "eval/avg_at_k": score.mean,
        "eval/avg_at_k_ci_low": score.low,
        "eval/avg_at_k_ci_high": score.high,
        "eval/pass_at_k": passed / num_prompts,
        **majority,
        "eval/response_length_mean": length / (num_prompts * k),
        "eval/truncation_rate": truncated / (num_prompts * k),
        "eval/num_prompts": num_prompts,
    }


def _table(
    rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], k: int
) -> list[dict[str, Any]]:
    """One row a response; first every prompt's response 0, then every prompt's response 1, ..."""
    rows = []
    for i in (first + j for j in range(k) for first in range(0, len(rollouts), k)):
        rollout, verdict = rollouts[i], verdicts[i]
        judged = "correct" if verdict.is_correct else "incorrect"
        rows.append(
            {
                "prompt": rollout.prompt.text,
                "answer": rollout.prompt.answer,
                "response": rollout.response_text,
                "extracted": verdict.extracted,
                "verdict": judged if verdict.failure is None else f"failed: {verdict.failure}",
                "reward": verdict.reward if math.isfinite(verdict.reward) else None,
                "length": len(rollout.response_ids),
                "finish_reason": str(rollout.finish_reason),
                "k": i % k,
            }
        )
    return rows
