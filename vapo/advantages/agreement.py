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
    """Mask tokens on which critics agree or disagree, and return the batch with its metrics.

    From `policy_mask` the share `agreement` of its tokens is removed, those of the lowest spread.
    From `entropy_mask` the share `disagreement` of the tokens of `loss_mask` is removed, those of
    the highest spread: there a bonus would make the policy explore states that no critic can judge.

    The policy mask must be final. Shares are of the whole rollout batch, which one process has (a
    rule). Policy loss and bonus are means over the remaining tokens; all else keeps all tokens.
    Nothing changes while the policy is not trained.

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
    """Remove from a mask the share of its tokens of the lowest spread, or highest (`sign` -1).

    Returns: the mask, and the share that was removed; whole tokens round it.
    """
    assert batch.value_spread is not None, "a rule: several critics"
    lowest = lowest_share_mask(sign * batch.value_spread, mask, share=share)
    return mask & ~lowest, int(lowest.sum()) / max(int(mask.sum()), 1)
