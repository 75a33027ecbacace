"""DAPO's dynamic sampling: prompts whose responses are all right or all wrong give no gradient.

Source: DAPO (2503.14476), section 3.2. The advantages of such a group are 0, so it is dropped,
and other prompts are sampled, until the batch is full or the attempts are used up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.types import Rollout

Group = list[Rollout]
"""All responses to one prompt."""


def is_mixed(group: Group) -> bool:
    """Whether verdicts (not shaped rewards) are neither all right nor all wrong.

    A group that lost an episode to its environment is not trained on.
    """
    if any(rollout.is_lost for rollout in group):
        return False
    return len({rollout.is_correct for rollout in group}) == 2


@dataclass(frozen=True)
class FilledBatch:
    """The requested number of groups: mixed ones first, then fillers, which carry no loss."""

    groups: list[Group]
    num_fillers: int
    attempts: int
    sampled: list[Group]

    def metrics(self) -> dict[str, float]:
        """The metrics of dynamic sampling, over all ranks."""
        is_correct = [bool(rollout.is_correct) for group in self.sampled for rollout in group]
        num_mixed = sum(map(is_mixed, self.sampled))
        counts = torch.tensor(
            [len(self.sampled) - num_mixed, self.num_fillers, sum(is_correct), len(is_correct)]
        )
        dropped, fillers, num_correct, num_sampled = sum_over_ranks(counts).tolist()
        return {
            "rollout/dynamic_sampling_attempts": float(self.attempts),
            "rollout/dropped_groups": float(dropped),
            "rollout/filler_groups": float(fillers),
            "rollout/sampled_accuracy": num_correct / num_sampled,
        }


class Filling:
    """Groups for a batch, added attempt by attempt until there are enough mixed ones.

    Mixed groups beyond `num_groups` are left out. What is missing after the last attempt is
    filled with dropped groups, the earliest first: every rank keeps its number of rows, hence of
    minibatches, and as fillers carry no loss the gradient is that of the smaller batch.

    Args:
        max_attempts: 0: all groups are taken, mixed or not, and one attempt has them.
    """

    def __init__(self, *, num_groups: int, max_attempts: int) -> None:
        self.num_groups, self.max_attempts = num_groups, max_attempts
        self.attempts = 0
        self.sampled: list[Group] = []

    def add(self, groups: list[Group]) -> None:
        """Add an attempt's groups."""
        self.sampled += groups
        self.attempts += 1

    @property
    def num_missing(self) -> int:
        """How many mixed groups are missing."""
        if self.max_attempts == 0:
            return self.num_groups - len(self.sampled)
        return self.num_groups - sum(map(is_mixed, self.sampled))

    @property
    def is_full(self) -> bool:
        """Whether no attempt is needed, or allowed, any more."""
        return self.num_missing <= 0 or self.attempts >= max(1, self.max_attempts)

    def filled(self) -> FilledBatch:
        """The batch. Raises: ValueError when all attempts have fewer than `num_groups` groups."""
        sampled, num_groups = self.sampled, self.num_groups
        if len(sampled) < num_groups:
            raise ValueError(f"{len(sampled)} groups were sampled, {num_groups} are needed")
        if self.max_attempts == 0:
            return FilledBatch(sampled, 0, self.attempts, sampled)
        mixed = [group for group in sampled if is_mixed(group)][:num_groups]
        uniform = [group for group in sampled if not is_mixed(group)]
        fillers = uniform[: num_groups - len(mixed)]
        return FilledBatch([*mixed, *fillers], len(fillers), self.attempts, sampled)


def fill_with_mixed_groups(sample: Callable[[int], list[Group]], filling: Filling) -> FilledBatch:
    """Sample until there are enough mixed groups, at most `filling.max_attempts` times.

    `sample(attempt)` must be a pure function of the attempt (and of the iteration it belongs
    to), so that a resumed run repeats it. Ranks make equally many attempts.

    Raises: ValueError when all attempts together have fewer groups than the batch.
    """
    while filling.attempts < filling.max_attempts:
        filling.add(sample(filling.attempts))
        if int(max_over_ranks(torch.tensor(filling.num_missing))) <= 0:
            break
    return filling.filled()


def groups_of(rollouts: Sequence[Rollout], group_size: int) -> list[Group]:
    """The groups of contiguous rollouts."""
    return [list(rollouts[i : i + group_size]) for i in range(0, len(rollouts), group_size)]
