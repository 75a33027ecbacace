"""Mask tokens in the policy's losses by how far several critics agree on their values."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Bool
from torch import Tensor

from vapo.functional.masking import lowest_share_mask
from vapo.types import TrainingBatch


def mask_by_spread(
    batch: TrainingBatch, *, agreement: float = 0.0, disagreement: float = 0.0
) -> tuple[TrainingBatch, dict[str, float]]:
    """Mask tokens on which several critics agree or disagree, and return the batch and metrics.

    The spread is the standard deviation of the critics' values. From `policy_mask` the share
    `agreement` of its tokens is removed, those of the lowest spread. From `entropy_mask` the share
    `disagreement` of the tokens of `loss_mask` is removed, those of the highest spread: there an
    entropy bonus would make the policy explore states that no critic can judge.

    The policy mask must be final. Shares are of the whole rollout batch, which one process has (the
    config's rules require that). Policy loss and entropy bonus are means over the remaining tokens;
    all other losses keep all tokens. Nothing changes while the policy is not trained.

    Source: AsyPPO (arXiv 2510.01656).
    """
    metrics: dict[str, float] = {}
    if batch.advantages is None:
        return batch, metrics
    if agreement:
        mask, left_out = _without_lowest(batch, batch.policy_mask, agreement)
        batch = replace(batch, policy_mask=mask)
        metrics["critic/agreement_masked_share"] = left_out
    if disagreement:
        mask, left_out = _without_lowest(batch, batch.loss_mask, disagreement, sign=-1)
        batch = replace(batch, entropy_mask=mask)
        metrics["critic/disagreement_masked_share"] = left_out
    return batch, metrics


def _without_lowest(
    batch: TrainingBatch, mask: Bool[Tensor, "B T"], share: float, *, sign: int = 1
) -> tuple[Bool[Tensor, "B T"], float]:
    """Remove the given share of a mask's tokens: those on which the critics' values differ least.

    With `sign` -1 those on which they differ most are removed.

    Returns: the mask, and the share that was removed, which is rounded to whole tokens.
    """
    assert batch.value_spread is not None, "a rule: several critics"
    lowest = lowest_share_mask(sign * batch.value_spread, mask, share=share)
    return mask & ~lowest, int(lowest.sum()) / max(int(mask.sum()), 1)
