"""How many episodes were lost to their environment, and to what."""

from __future__ import annotations

import torch

from vapo.system.distributed import sum_over_ranks
from vapo.types import RolloutBatch

KINDS = ("timeout", "crash", "error", "garbled")


def failure_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Failed episodes of all ranks, before they are left out, in all and by the kind of failure.

    Every rank must call this.
    """
    kinds = [str(r.failure).partition(":")[0] for r in batch.rollouts if r.is_lost]
    counts = torch.tensor([len(kinds), *(kinds.count(kind) for kind in KINDS)])
    total, *by_kind = sum_over_ranks(counts).tolist()
    found = zip((f"rollout/failed_{kind}" for kind in KINDS), by_kind, strict=True)
    return {"rollout/failed_episodes": float(total), **{k: float(n) for k, n in found}}
