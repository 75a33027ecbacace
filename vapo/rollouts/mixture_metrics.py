"""Metrics of each source of a mixture, and the stage of a curriculum, over all ranks."""

from __future__ import annotations

import torch

from vapo.prompts.training_set import TrainingSet
from vapo.system.distributed import gather_over_ranks
from vapo.types import RolloutBatch


def source_metrics(
    batch: RolloutBatch, training: TrainingSet, *, iteration: int
) -> dict[str, float]:
    """Compute `source_NAME/...` of every source with prompts in the batch, and their number.

    Without a mixture, `rollout/curriculum_stage` of a curriculum, and nothing else.
    """
    metrics: dict[str, float] = {}
    for source in training.sources:
        if len(source.stages) > 1:
            group = f"source_{source.name}" if source.name else "rollout"
            metrics[f"{group}/curriculum_stage"] = float(source.stage_at(iteration))
    names = [source.name for source in training.sources if source.name]
    if not names:
        return metrics
    columns = torch.stack(
        [
            torch.tensor([names.index(r.prompt.source) for r in batch.rollouts]).double(),
            batch.is_correct.double(),
            batch.rewards.double(),
            batch.response_lengths.double(),
        ],
        dim=1,
    )
    rows = gather_over_ranks(columns)
    for index, name in enumerate(names):
        of_source = rows[rows[:, 0] == index]
        metrics[f"source_{name}/num_prompts"] = len(of_source) / batch.group_size
        if len(of_source):
            _, accuracy, reward, length = of_source.mean(dim=0).tolist()
            metrics[f"source_{name}/accuracy"] = accuracy
            metrics[f"source_{name}/reward_mean"] = reward
            metrics[f"source_{name}/response_length_mean"] = length
    return metrics
