"""OPPO: values from how much likelier the answer makes the policy's tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from vapo.config.estimators import OppoConfig
from vapo.config.rewards import RewardConfig
from vapo.functional.masking import first_column, zero_outside
from vapo.functional.metrics import explained_variance
from vapo.functional.token_baselines import success_values
from vapo.system.distributed import gather_over_ranks, sum_over_ranks
from vapo.types import EvaluatedBatch


def with_success_values(
    batch: EvaluatedBatch, options: OppoConfig, rewards: RewardConfig
) -> EvaluatedBatch:
    """Return the batch with OPPO's value of each state as `step_values`.

    Raises: ValueError: the batch lacks log-probs with or without the answer in the prompt.
    """
    if batch.answer_logprobs is None or batch.old_logprobs is None:
        raise ValueError("OPPO reads log-probs with and without the answer, which this batch lacks")
    values = success_values(
        batch.is_correct,
        batch.answer_logprobs,
        batch.old_logprobs,
        batch.response_mask,
        group_size=batch.group_size,
        smoothing=options.smoothing,
        max_evidence=options.max_evidence,
        low=rewards.incorrect,
        high=rewards.correct,
    )
    return replace(batch, step_values=values)


def success_metrics(batch: EvaluatedBatch) -> dict[str, float]:
    """Return metrics of OPPO's values: how well they predict the rewards, and the mean evidence.

    The evidence of a response is by how much the answer in the prompt raises its log-prob. It is
    averaged over right and over wrong responses. If there are no right, or no wrong ones, that
    mean's key is missing. Every rank must call this.
    """
    values, mask = batch.step_values, batch.response_mask
    assert values is not None
    assert batch.answer_logprobs is not None
    assert batch.old_logprobs is not None
    returns = batch.rewards[:, None].expand(mask.shape)
    prior = values.gather(1, first_column(mask)[:, None]).expand(mask.shape)
    metrics = {
        f"oppo/{name}": float(explained_variance(x, returns, mask, reduce=sum_over_ranks))
        for name, x in (("explained_variance", values), ("prior_explained_variance", prior))
    }
    evidence = zero_outside(batch.answer_logprobs - batch.old_logprobs, mask).sum(dim=1)
    columns = gather_over_ranks(torch.stack([evidence, batch.is_correct.to(evidence.dtype)], dim=1))
    for name, is_kind in (("right", columns[:, 1] > 0), ("wrong", columns[:, 1] == 0)):
        if bool(is_kind.any()):
            metrics[f"oppo/evidence_{name}_mean"] = float(columns[is_kind, 0].mean())
    return metrics
