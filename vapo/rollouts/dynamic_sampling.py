"""DAPO's dynamic sampling: prompts whose responses are all right or all wrong give no gradient.

Source: DAPO (2503.14476), section 3.2. The advantages of such a group are 0, so it is dropped,
and other prompts are sampled, until the batch is full or the attempts are used up.
"""

from __future__ import annotations

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


class Filling:
    """Groups for a batch, added attempt by attempt until there are enough mixed ones.

    Mixed groups beyond `num_groups` are left out. What is missing after the last attempt is
    filled with dropped groups, the earliest first: every rank keeps its number of rows, hence of
    minibatches, and as fillers carry no loss the gradient is that of the smaller batch.

    Args:
        num_groups: of this rank; so many groups has an attempt at least.
        max_attempts: 0: all groups are taken, mixed or not, and one attempt has them.
    """

    def __init__(self, *, num_groups: int, max_attempts: int) -> None:
        self.num_groups, self.max_attempts = num_groups, max_attempts
        self.attempts = 0
        self.sampled: list[Group] = []
        self.is_full = False
        """Whether no attempt is needed, or allowed, any more: on all ranks after as many."""

    def add(self, groups: list[Group]) -> None:
        """Add an attempt's groups. Every rank must call this where there may be several attempts:
        all go on as long as any of them misses groups."""
        self.sampled += groups
        self.attempts += 1
        is_last = self.attempts >= self.max_attempts
        self.is_full = is_last or int(max_over_ranks(torch.tensor(self._num_missing))) <= 0

    def _is_wanted(self, group: Group) -> bool:
        return self.max_attempts == 0 or is_mixed(group)

    @property
    def _wanted(self) -> list[Group]:
        return [group for group in self.sampled if self._is_wanted(group)][: self.num_groups]

    @property
    def _num_missing(self) -> int:
        return self.num_groups - len(self._wanted)

    @property
    def fillers(self) -> list[Group]:
        """The batch's groups that carry no loss."""
        return [group for group in self.sampled if not self._is_wanted(group)][: self._num_missing]

    @property
    def groups(self) -> list[Group]:
        """The batch's groups: those that are wanted, then the fillers."""
        return [*self._wanted, *self.fillers]

    def metrics(self) -> dict[str, float]:
        """The metrics of dynamic sampling, over all ranks; none without it."""
        if self.max_attempts == 0:
            return {}
        is_correct = [bool(rollout.is_correct) for group in self.sampled for rollout in group]
        num_dropped = sum(not is_mixed(group) for group in self.sampled)
        counts = [num_dropped, len(self.fillers), sum(is_correct), len(is_correct)]
        summed = sum_over_ranks(torch.tensor(counts)).tolist()
        dropped, fillers, num_correct, num_sampled = summed
        return {
            "rollout/dynamic_sampling_attempts": float(self.attempts),
            "rollout/dropped_groups": float(dropped),
            "rollout/filler_groups": float(fillers),
            "rollout/sampled_accuracy": num_correct / num_sampled,
        }
