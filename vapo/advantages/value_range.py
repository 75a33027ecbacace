"""Whether a batch's value targets are within the range of the critic's head."""

from __future__ import annotations

import math

import torch

from vapo.config.critic import CriticConfig
from vapo.config.critic_rules import value_range
from vapo.errors import UserError
from vapo.system.distributed import max_over_ranks
from vapo.types import TrainingBatch


def check_value_targets(batch: TrainingBatch, critic: CriticConfig) -> None:
    """Compare before the update; nothing to do for a head without a range. All ranks call it.

    Verifiers that give rewards of their own are known only now.

    Raises: UserError on all ranks, naming the targets' range and the head's.
    """
    ends = value_range(critic)
    if ends is None or batch.value_targets is None:
        return
    targets = batch.value_targets
    counted = targets[batch.value_mask & torch.isfinite(targets)]
    found = torch.tensor([-math.inf, -math.inf])
    if len(counted):
        found = torch.stack([-counted.min(), counted.max()]).float().cpu()
    negative_low, high = max_over_ranks(found).tolist()
    low = -negative_low
    if low > high or ends.holds(low, high):
        return
    raise UserError(
        f"the value targets of this batch reach from {low:g} to {high:g}, and the "
        f"{critic.head.kind} head learns values from {ends.low:g} to {ends.high:g}: widen "
        "critic.head.low and critic.head.high (targets beyond them would count as the nearer end), "
        "or set critic.head.kind=scalar"
    )
