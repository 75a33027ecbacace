"""Updates that are skipped because a number is not finite: the decision, the counts, the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vapo.errors import StoppedRun
from vapo.rollouts.bad_rows import BadRollouts
from vapo.runs.summary import FAILED_EPISODES
from vapo.system.distributed import max_over_ranks

NETWORKS = ("actor", "critic")
_LOOK_AT = {
    "actor": "lower actor.optimizer.lr or actor.optimizer.max_grad_norm, or compute in "
    "trainer.precision=32-true",
    "critic": "lower critic.optimizer.lr, check rewards.correct and rewards.incorrect for size, "
    "or compute in trainer.precision=32-true",
}


def finite_over_ranks(norm: Tensor, loss: Tensor) -> tuple[float, bool]:
    """The gradient norm, and whether it and every rank's loss are finite.

    Both are copied from the device at once. The decision is reduced as a flag, since a maximum of
    nans is not the same on every backend: all ranks step, or none.
    """
    is_bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
    is_bad = max_over_ranks(is_bad.to(norm.dtype))
    norm_value, bad = torch.stack([norm.detach(), is_bad]).tolist()
    return norm_value, not bad


@dataclass
class Streak:
    """Updates of one network skipped in a row."""

    count: int
    since: str
    reason: str


class Faults:
    """Counts skipped updates and rollouts left out; the counts are the same on all ranks.

    An update is one network's optimizer step. A skipped one changes neither weights nor Adam's
    state nor the learning rate's schedule; it is still a minibatch of `trainer.global_step`. A
    minibatch without a loss of the network is no fault, and not counted here.
    """

    def __init__(self, max_bad_updates: int, max_saved_rollouts: int) -> None:
        self.max_bad_updates = max_bad_updates
        self.rollouts = BadRollouts(max_saved_rollouts)
        self.note: Callable[[str], None] = lambda text: None
        self.streaks: dict[str, Streak] = {}
        self.totals: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._leaves_out = False

    def stepped(self, network: str) -> None:
        """An update went well: the streak is over."""
        if (streak := self.streaks.pop(network, None)) and streak.count > 1:
            self.note(f"{network}: updates resumed, after {streak.count} skipped in a row")

    def skipped(self, network: str, place: str, reason: str) -> None:
        """Count a skipped update; one line for each streak.

        Raises: StoppedRun when there are too many in a row.
        """
        self._count(f"{network}_updates_skipped", 1)
        streak = self.streaks.setdefault(network, Streak(0, place, reason))
        streak.count += 1
        if streak.count == 1:
            self.note(
                f"{network}: update skipped at {place}: {reason}; the weights stay as they "
                f"were{self.rollouts.describe()}"
            )
        if streak.count >= self.max_bad_updates:
            raise StoppedRun(
                f"{streak.count} updates of the {network} in a row were not finite "
                f"(watch.max_bad_updates), since {streak.since}: {streak.reason}"
                f"{self.rollouts.describe()}; the weights are as before the first of them; "
                f"{_LOOK_AT[network]}"
            )

    def left_out(self, number: int, place: str, reason: str, *, num_failed: int = 0) -> None:
        """Count the iteration's rollouts that were left out; one line for each streak of them.

        Args:
            num_failed: of them, those whose numbers are finite: an environment failed.
        """
        self._counted["rollouts_left_out"] += number
        self.totals["rollouts_left_out"] += number - num_failed
        if num_failed:
            self.totals[FAILED_EPISODES] += num_failed
        if number and not self._leaves_out:
            self.note(f"{number} rollouts left out in {place}: {reason}{self.rollouts.describe()}")
        self._leaves_out = number > 0

    def pop_metrics(self) -> dict[str, float]:
        """The counts since the last call, as metrics; resets them."""
        keys = (*(f"{network}_updates_skipped" for network in NETWORKS), "rollouts_left_out")
        counted, self._counted = self._counted, Counter()
        return {f"faults/{key}": float(counted[key]) for key in keys}

    def _count(self, key: str, number: int) -> None:
        self._counted[key] += number
        self.totals[key] += number
