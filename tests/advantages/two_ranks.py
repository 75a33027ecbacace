"""The advantage stage of each baseline on one process, or on two that share the groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.judged import judged_batch
from tests.systems import system_config
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.poise import baseline_of
from vapo.config import FitConfig
from vapo.environments.contract import Verdict
from vapo.system.distributed import gather_over_ranks
from vapo.types import EvaluatedBatch, FinishReason, Phase, Prompt, Rollout

KINDS = {
    "critic": (),
    "linear_mix": ("algorithm.baseline.kind=linear_mix",),
    "tether": ("algorithm.baseline.kind=tether",),
    "trusted": ("algorithm.baseline.kind=trusted",),
    "evpo": ("algorithm.baseline.kind=evpo",),
    "evpo above": ("algorithm.baseline.kind=evpo", "algorithm.baseline.threshold=0.99"),
    "prompt_noise": ("critic.weights=prompt_noise", "critic.anchors=[0.5]"),
}
CORRECT = [True, False, True, True, False, False, True, False]


def batch_of(
    config: FitConfig, correct: Sequence[bool], values: Sequence[Sequence[float]]
) -> EvaluatedBatch:
    """Groups of two; each response has as many tokens as values."""
    rollouts = [
        Rollout(
            Prompt(f"p:{i // 2}", "", (2,), "1"),
            (5,) * len(row),
            "",
            (-1.0,) * len(row),
            FinishReason.STOP,
        )
        for i, row in enumerate(values)
    ]
    batch = judged_batch(
        rollouts,
        [Verdict(c, config.rewards.correct if c else config.rewards.incorrect) for c in correct],
        group_size=2,
        rewards=config.rewards,
        max_response_tokens=8,
    )
    old_values = torch.zeros(batch.response_mask.shape)
    old_values[batch.response_mask] = torch.tensor([v for row in values for v in row])
    return EvaluatedBatch(
        **vars(batch),
        old_values=old_values,
        old_logprobs=torch.full(batch.response_mask.shape, -1.0),
    )


def computed(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """For each kind, two iterations on the same rollouts; whatever the number of processes."""
    draw = torch.Generator().manual_seed(0)
    signs = torch.tensor(CORRECT).float() - 0.5
    noise = torch.randn(8, 4, generator=draw)
    values = (noise + 3 * signs[:, None]).tolist()
    share = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
    found = {}
    for kind, overrides in KINDS.items():
        config = system_config("vapo", "components.group_sampling.group_size=2", *overrides)
        baseline = baseline_of(config.algorithm)
        for _ in range(2):
            batch = batch_of(config, CORRECT[share], values[share])
            made = estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config, baseline)
        assert made.advantages is not None
        found[kind] = {
            "advantages": gather_over_ranks(made.advantages),
            "weights": gather_over_ranks(made.value_weights),
            "metrics": baseline.metrics,
            "state": baseline.state_dict(),
        }
    return found


def computed_on_a_rank() -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo")
    found = computed(dist.get_rank(), 2)
    dist.barrier()
    dist.destroy_process_group()
    return found
