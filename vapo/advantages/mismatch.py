"""The mismatch stage: what the engine's policy differs from the trainer's by, and its correction.

The correction is for the surrogate alone. The value loss and the positive-example LM loss keep
every token and weight: value targets are of whatever policy acted, and a response that the
verifier found correct is an example to imitate whoever wrote it. The KL term and the entropy
bonus keep theirs too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vapo.config.schema import MismatchConfig
from vapo.functional.mismatch import (
    mismatch,
    responses_in_range,
    truncated_importance_weights,
)
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.types import EvaluatedBatch, TrainingBatch


def correct_mismatch(batch: TrainingBatch, correction: MismatchConfig) -> TrainingBatch:
    """The batch with the importance weights and the policy mask that the config asks for.

    Needs the final `loss_mask`. Nothing changes while the policy is not trained.
    """
    if batch.old_logprobs is None:
        return batch
    logprobs = (batch.rollout_logprobs, batch.old_logprobs, batch.response_mask)
    if correction.tis_cap is not None:
        weights = truncated_importance_weights(
            *logprobs, cap=correction.tis_cap, level=correction.tis_level
        )
        batch = replace(batch, importance_weights=weights)
    if correction.masks:
        kept = responses_in_range(*logprobs, low=correction.mask_below, high=correction.mask_above)
        batch = replace(batch, policy_mask=batch.loss_mask & kept[:, None])
    return batch


def mismatch_metrics(batch: EvaluatedBatch) -> dict[str, float]:
    """Engine against trainer, over the sampled tokens of all ranks."""
    if batch.old_logprobs is None:
        return {}
    found = mismatch(
        batch.rollout_logprobs,
        batch.old_logprobs,
        batch.response_mask,
        reduce=sum_over_ranks,
        reduce_max=max_over_ranks,
    )
    metrics = {
        "rollout/logprob_gap_mean": float(found.mean_abs),
        "rollout/logprob_gap_max": float(found.max_abs),
        "rollout/mismatch_k3": float(found.k3),
        "rollout/mismatch_outlier_share": float(found.outlier_share),
    }
    for name, ratio in (
        ("rollout/mismatch_ratio", found.token_ratio),
        ("rollout/mismatch_sequence_ratio", found.sequence_ratio),
    ):
        metrics |= {f"{name}_{key}": float(value) for key, value in ratio._asdict().items()}
    ratio = found.token_ratio
    squares = float(ratio.mean) ** 2 + float(ratio.std) ** 2
    metrics["rollout/effective_sample_share"] = float(ratio.mean) ** 2 / squares
    return metrics


def correction_metrics(batch: TrainingBatch, correction: MismatchConfig) -> dict[str, float]:
    """What the correction did: of the loss-carrying responses and tokens of all ranks."""
    loss_mask, policy_mask = batch.loss_mask, batch.policy_mask
    metrics: dict[str, float] = {}
    if correction.masks and batch.old_logprobs is not None:
        rows = torch.stack([loss_mask.any(dim=1).sum(), policy_mask.any(dim=1).sum()])
        num_rows, num_kept = sum_over_ranks(rows).tolist()
        metrics["rollout/mismatch_masked_share"] = 1.0 - num_kept / num_rows if num_rows else 0.0
    if batch.importance_weights is not None:
        weights = batch.importance_weights[policy_mask].double()
        is_cut = weights >= (correction.tis_cap or torch.inf)
        sums = torch.stack([weights.sum(), is_cut.sum().double(), policy_mask.sum().double()])
        total, num_cut, num_tokens = sum_over_ranks(sums).tolist()
        metrics["rollout/mismatch_weight_mean"] = total / num_tokens if num_tokens else 1.0
        metrics["rollout/mismatch_clipped_share"] = num_cut / num_tokens if num_tokens else 0.0
    return metrics
