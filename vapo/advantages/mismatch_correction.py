"""Weigh or mask tokens in the policy's loss, to correct for the engine's mismatch.

The mismatch is the difference of the engine's policy from the trainer's. Only the surrogate is
corrected. The value loss and the positive-example LM loss keep every token and weight: value
targets belong to whatever policy acted, and a response that the verifier found correct is an
example to imitate, whatever sampled it. The KL term and the entropy bonus keep theirs, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vapo.config.schema import MismatchConfig
from vapo.functional.mismatch import (
    icepop_weights,
    mismatch,
    responses_in_range,
    truncated_importance_weights,
)
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.types import EvaluatedBatch, TrainingBatch


def correct_mismatch(batch: TrainingBatch, correction: MismatchConfig) -> TrainingBatch:
    """Return the batch with the importance weights and the policy mask that the config describes.

    They correct the policy's loss for the difference of the engine's policy from the trainer's. The
    batch's `loss_mask` must be final. While the policy is not trained, the batch is unchanged.
    """
    if batch.old_logprobs is None:
        return batch
    logprobs = (batch.rollout_logprobs, batch.old_logprobs, batch.response_mask)
    if correction.tis_cap is not None:
        weights = truncated_importance_weights(
            *logprobs, cap=correction.tis_cap, level=correction.tis_level
        )
        batch = replace(batch, importance_weights=weights)
    elif correction.icepop:
        low, high = correction.icepop_low, correction.icepop_high
        batch = replace(batch, importance_weights=icepop_weights(*logprobs, low=low, high=high))
    if correction.masks:
        is_in_range = responses_in_range(
            *logprobs, low=correction.mask_below, high=correction.mask_above
        )
        batch = replace(batch, policy_mask=batch.loss_mask & is_in_range[:, None])
    return batch


def mismatch_metrics(batch: EvaluatedBatch) -> dict[str, float]:
    """Return metrics of how far the log-probs of engine and trainer differ, over all ranks.

    They are empty if the batch has no log-probs of the trainer.
    """
    if batch.old_logprobs is None:
        return {}
    return gap_metrics(batch.rollout_logprobs, batch.old_logprobs, batch.response_mask)


class EngineGaps:
    """Collects log-probs of an iteration's updates, to compare them with the engine's.

    In the first optimizer step the trainer's log-probs are those from before the update. In a later
    step they also contain the effect of the earlier steps.
    """

    def __init__(self) -> None:
        # each micro-batch's log-probs [2, n] of engine and trainer, and its responses' lengths
        self._micro_batches: list[tuple[Tensor, Tensor]] = []

    def clear(self) -> None:
        """Forget the log-probs of the iteration."""
        self._micro_batches.clear()

    def add(self, logprobs: Float[Tensor, "b T"], rows: TrainingBatch) -> None:
        """Keep the trainer's log-probs of a micro-batch, and the engine's of the same tokens.

        Args:
            logprobs: the trainer's log-probs.
            rows: the micro-batch, which has the engine's.
        """
        mask = rows.response_mask
        tokens = torch.stack([rows.rollout_logprobs, logprobs.detach()])[:, mask]
        self._micro_batches.append((tokens.cpu(), mask.sum(dim=1).cpu()))

    def metrics(self) -> dict[str, float]:
        """Compare the engine's and the trainer's log-probs of the tokens kept by `add`.

        Return `rollout/logprob_gap_*`, `rollout/mismatch_*` and `rollout/effective_sample_share`
        over all ranks; empty if no rank has a token. Every rank must call this.
        """
        lengths = torch.cat(
            [n for _, n in self._micro_batches] or [torch.zeros(1, dtype=torch.long)]
        )
        if not float(sum_over_ranks(lengths.sum().double())):
            return {}
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        tokens = torch.cat([t for t, _ in self._micro_batches] or [torch.zeros(2, 0)], dim=1)
        rollout_logprobs, logprobs = (
            torch.zeros(mask.shape, dtype=t.dtype).masked_scatter(mask, t) for t in tokens
        )
        share = effective_sample_share(rollout_logprobs, logprobs, mask, level="token")
        gaps = gap_metrics(rollout_logprobs, logprobs, mask)
        return gaps | {"rollout/effective_sample_share": share}


def gap_metrics(
    rollout_logprobs: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> dict[str, float]:
    """Return metrics of how far the engine's and the trainer's log-probs differ, over all ranks.

    Their names are `rollout/logprob_gap_*` and `rollout/mismatch_*`. Every rank must call this.
    """
    gap = mismatch(
        rollout_logprobs, logprobs, mask, reduce=sum_over_ranks, reduce_max=max_over_ranks
    )
    metrics = {
        "rollout/logprob_gap_mean": float(gap.mean_abs),
        "rollout/logprob_gap_max": float(gap.max_abs),
        "rollout/mismatch_k3": float(gap.k3),
        "rollout/mismatch_outlier_share": float(gap.outlier_share),
    }
    for name, ratio in (
        ("rollout/mismatch_ratio", gap.token_ratio),
        ("rollout/mismatch_sequence_ratio", gap.sequence_ratio),
    ):
        metrics |= {f"{name}_{key}": float(value) for key, value in ratio._asdict().items()}
    return metrics


def correction_metrics(batch: TrainingBatch, correction: MismatchConfig) -> dict[str, float]:
    """Return metrics of how much of the loss the correction masks and weighs, over all ranks.

    `rollout/effective_sample_share` is among them even without a correction. They are empty if the
    batch has no log-probs of the trainer. Every rank must call this.
    """
    if batch.old_logprobs is None:
        return {}
    loss_mask, policy_mask = batch.loss_mask, batch.policy_mask
    logprobs = (batch.rollout_logprobs, batch.old_logprobs, batch.response_mask)
    share = effective_sample_share(*logprobs, level=correction.tis_level)
    metrics = {"rollout/effective_sample_share": share}
    if correction.masks:
        rows = torch.stack([loss_mask.any(dim=1).sum(), policy_mask.any(dim=1).sum()])
        num_rows, num_kept = sum_over_ranks(rows).tolist()
        metrics["rollout/mismatch_masked_share"] = 1.0 - num_kept / num_rows if num_rows else 0.0
    if correction.weighs:
        weights = batch.importance_weights[policy_mask].double()
        cap = correction.tis_cap
        is_cut = weights == 0 if cap is None else weights >= cap
        sums = torch.stack([weights.sum(), is_cut.sum().double(), policy_mask.sum().double()])
        total, num_cut, num_tokens = sum_over_ranks(sums).tolist()
        key = "masked_token_share" if cap is None else "clipped_share"
        metrics["rollout/mismatch_weight_mean"] = total / num_tokens if num_tokens else 1.0
        metrics[f"rollout/mismatch_{key}"] = num_cut / num_tokens if num_tokens else 0.0
    return metrics


def effective_sample_share(
    rollout_logprobs: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    level: Literal["token", "sequence"],
) -> float:
    """Return which share of the n sampled tokens would be as informative if all weights were equal.

        (sum w)^2 / (n sum w^2)        over the tokens of all ranks

    w are the importance weights, not truncated: each token's probability ratio of trainer and
    engine, or with the level `sequence` the product over its response. nan if there is no token.

    Source: Kish 1965, the effective sample size.
    """
    weights = truncated_importance_weights(
        rollout_logprobs, logprobs, mask, cap=math.inf, level=level
    )[mask].double()
    sums = torch.stack([weights.sum(), weights.square().sum(), mask.sum().double()])
    total, squares, count = sum_over_ranks(sums).tolist()
    return total**2 / (squares * count) if count else math.nan
