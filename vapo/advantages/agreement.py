"""What masks tokens in the policy's losses by how far several critics agree on their values."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Bool
from torch import Tensor

from vapo.functional.masking import lowest_share_mask
from vapo.types import TrainingBatch


def mask_by_spread(
    batch: TrainingBatch, *, agreement: float = 0.0, disagreement: float = 0.0
) -> tuple[TrainingBatch, dict[str, float]]:
    """Take from the policy's losses tokens on which critics agree or disagree; with the metrics.

    `policy_mask` loses the share `agreement` of its tokens of the lowest spread. `entropy_mask`
    loses the share `disagreement` of the tokens of `loss_mask` of the highest: there a bonus would
    have the policy explore states that no critic can judge.

    Needs the final policy mask. The tokens are those of the whole rollout batch, in one process (a
    rule). Policy loss and bonus are means over those that are left; all else keeps all tokens.
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
    """The mask without the share of its tokens of the lowest spread, or with `sign` -1 of the
    highest; the share that was left out, which whole tokens round."""
    assert batch.value_spread is not None, "a rule: several critics"
    lowest = lowest_share_mask(sign * batch.value_spread, mask, share=share)
    return mask & ~lowest, int(lowest.sum()) / max(int(mask.sum()), 1)
