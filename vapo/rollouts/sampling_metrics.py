"""Metrics of how a batch came about, over all ranks: its sources, lost episodes, the age of it."""

from __future__ import annotations

import torch

from vapo.prompts.training_set import TrainingSet
from vapo.system.distributed import gather_over_ranks, max_over_ranks, sum_over_ranks
from vapo.types import RolloutBatch

FAILURES = ("timeout", "crash", "error", "garbled")


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


def failure_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Failed episodes of all ranks, before they are left out, in all and by the kind of failure.

    Every rank must call this.
    """
    kinds = [str(r.failure).partition(":")[0] for r in batch.rollouts if r.is_lost]
    counts = torch.tensor([len(kinds), *(kinds.count(kind) for kind in FAILURES)])
    total, *by_kind = sum_over_ranks(counts).tolist()
    found = zip((f"rollout/failed_{kind}" for kind in FAILURES), by_kind, strict=True)
    return {"rollout/failed_episodes": float(total), **{k: float(n) for k, n in found}}


def staleness_metrics(batch: RolloutBatch, policy_iterations: int) -> dict[str, float]:
    """By how many policy iterations the weights that sampled are older than the actor's now.

    The mean is over sampled tokens. A token has the age of the weights that sampled it where the
    engine says which those were, else of the weights when its turn was asked for; and none where
    nobody counts the updates, as then it is sampled with the actor's own.

    Args:
        policy_iterations: those before this one.
    """
    ages: list[float] = [0.0]  # of no token
    tokens: list[int] = [0]
    for rollout in batch.rollouts:
        for turn in rollout.turns:
            for version, num_tokens in turn.versions or [(policy_iterations, turn.num_sampled)]:
                # the push that ends value pretraining counts, and is no iteration of the policy
                ages.append(max(0.0, float(policy_iterations - version)))
                tokens.append(num_tokens)
    age, count = torch.tensor(ages).double(), torch.tensor(tokens).double()
    total, num = sum_over_ranks(torch.stack([(age * count).sum(), count.sum()])).tolist()
    return {
        "rollout/staleness_iterations": float(max_over_ranks(age.max())),
        "rollout/staleness_mean": total / num if num else 0.0,
    }
