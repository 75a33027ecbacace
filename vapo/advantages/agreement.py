"""What masks tokens in the policy's losses by how far several critics agree on their values."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Bool
from torch import Tensor

from vapo.functional.masking import lowest_share_mask
from vapo.types import TrainingBatch


def mask_agreement(batch: TrainingBatch, share: float) -> tuple[TrainingBatch, dict[str, float]]:
    """The batch whose `policy_mask` is without the share of its tokens of the lowest spread.

    Needs the final policy mask. The tokens are those of the whole rollout batch that carry policy
    loss, in one process (a rule). The loss's denominators count the tokens that are left; the
    other losses of the policy keep theirs, and so do the value loss, advantages and whitening.

    Returns:
        the batch, and the metric of what was masked. Nothing changes while the policy is not
        trained.

    Source: AsyPPO (arXiv 2510.01656).
    """
    if not share or batch.advantages is None:
        return batch, {}
    mask, masked_share = _without_lowest(batch, batch.policy_mask, share)
    return replace(batch, policy_mask=mask), {"critic/agreement_masked_share": masked_share}


def mask_disagreement(batch: TrainingBatch, share: float) -> tuple[TrainingBatch, dict[str, float]]:
    """The batch whose `entropy_mask` is without the share of its tokens of the highest spread.

    There a bonus would have the policy explore states that no critic can judge. The tokens are
    those of the whole rollout batch that carry the policy's losses (`loss_mask`), in one process
    (a rule). The bonus is a mean over those that are left; everything else keeps all tokens.

    Returns:
        the batch, and the metric of what was masked. Nothing changes while the policy is not
        trained.

    Source: AsyPPO (arXiv 2510.01656).
    """
    if not share or batch.advantages is None:
        return batch, {}
    mask, masked_share = _without_lowest(batch, batch.loss_mask, share, sign=-1)
    return replace(batch, entropy_mask=mask), {"critic/disagreement_masked_share": masked_share}


def _without_lowest(
    batch: TrainingBatch, mask: Bool[Tensor, "B T"], share: float, *, sign: int = 1
) -> tuple[Bool[Tensor, "B T"], float]:
    """The mask without the share of its tokens of the lowest spread, or with `sign` -1 of the
    highest; the share that was left out, which whole tokens round."""
    assert batch.value_spread is not None, "a rule: several critics"
    lowest = lowest_share_mask(sign * batch.value_spread, mask, share=share)
    return mask & ~lowest, int(lowest.sum()) / max(int(mask.sum()), 1)
