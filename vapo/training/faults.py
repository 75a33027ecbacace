"""Skips and counts updates whose loss or gradient is not finite, ends a run that has too many of
them in a row, and saves the rollouts that have numbers which are not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vapo.errors import StoppedRun
from vapo.functional.columns import float_columns
from vapo.rollouts.bad_rows import BadRollouts
from vapo.runs.summary import FAILED_EPISODES
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.training.minibatches import NETWORKS, Microbatch
from vapo.types import Rollout

_LOOK_AT = {
    "actor": "lower actor.optimizer.lr or actor.optimizer.max_grad_norm, or compute in "
    "trainer.precision=32-true",
    "critic": "lower critic.optimizer.lr (of a probe critic.probe.lr), check rewards.correct and "
    "rewards.incorrect for size, "
    "or compute in trainer.precision=32-true",
}
# The engine's log-probs are in every record, as they came.
_NOT_TRAINED_ON = (
    *("rollout_logprobs", "old_entropy", "raw_advantages"),
    *("turn_rewards", "token_rewards", "value_rewards"),
)
_NUM_SHOWN = 4  # rollouts of a minibatch in which no single one is bad


def finite_over_ranks(norm: Tensor, loss: Tensor) -> tuple[float, bool]:
    """Return the gradient norm, and whether the norm and the loss are finite on every rank.

    All ranks get the same flag, so that all of them step or none does. The flag is reduced over
    ranks, and not the norm, because the maximum over nans differs between backends. Both results
    are copied from the device in one transfer.
    """
    is_bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
    is_bad = max_over_ranks(is_bad.to(norm.dtype))
    norm_value, bad = torch.stack([norm.detach(), is_bad]).tolist()
    return norm_value, not bad


@dataclass
class Streak:
    """A count of one network's updates that were skipped in a row.

    `since` is the place of the first of them in the run, such as "iteration 3, step 12", and
    `reason` says why it was skipped.
    """

    count: int
    since: str
    reason: str


class Faults:
    """Counts skipped updates and rollouts left out. The counts are the same on all ranks.

    An update is one network's optimizer step. A skipped update changes neither weights nor Adam's
    state nor the learning rate's schedule, but counts in `trainer.global_step`. A minibatch in
    which a network has no loss is not a fault and is not counted here.
    """

    def __init__(self, max_bad_updates: int, max_saved_rollouts: int) -> None:
        self.max_bad_updates = max_bad_updates
        self.rollouts = BadRollouts(max_saved_rollouts)
        self.note: Callable[[str], None] = lambda text: None
        self.streaks: dict[str, Streak] = {}
        self.latest_skipped: list[str] = []  # networks whose last update of the iteration was
        self.totals: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._leaves_out = False

    def state_dict(self) -> dict[str, Any]:
        return {network: asdict(streak) for network, streak in self.streaks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.streaks = {network: Streak(**streak) for network, streak in state.items()}

    def stepped(self, network: str) -> None:
        """End the network's streak of skipped updates; note it if several were skipped."""
        if (streak := self.streaks.pop(network, None)) and streak.count > 1:
            self.note(f"{network}: updates resumed, after {streak.count} skipped in a row")

    def skipped(self, network: str, place: str, reason: str) -> None:
        """Count a skipped update of the network, and note the first of a streak on the console.

        Args:
            place: where in the run the update was due, such as "iteration 3, step 12".
            reason: which numbers were not finite.

        Raises: StoppedRun: `max_bad_updates` updates of the network in a row were skipped.
        """
        for counts in (self._counted, self.totals):
            counts[f"{network}_updates_skipped"] += 1
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
        """Count the rollouts of an iteration that are not trained on.

        If several iterations in a row leave rollouts out, the first is noted on the console.

        Args:
            number: how many rollouts were left out; may be 0.
            place: the iteration, as the note names it.
            reason: why they were left out.
            num_failed: how many of these were left out because an environment failed, and not
                because a number was not finite.
        """
        self._counted["rollouts_left_out"] += number
        self.totals["rollouts_left_out"] += number - num_failed
        if num_failed:
            self.totals[FAILED_EPISODES] += num_failed
        if number and not self._leaves_out:
            self.note(f"{number} rollouts left out in {place}: {reason}{self.rollouts.describe()}")
        self._leaves_out = number > 0

    def pop_metrics(self) -> dict[str, float]:
        """Return the counts since the last call as `faults/...` metrics, and reset the counts. It
        is called once per iteration."""
        self.latest_skipped = [n for n in self.streaks if self._counted[f"{n}_updates_skipped"]]
        keys = (*(f"{network}_updates_skipped" for network in NETWORKS), "rollouts_left_out")
        counted, self._counted = self._counted, Counter()
        return {f"faults/{key}": float(counted[key]) for key in keys}


@torch.no_grad()
def inspect_minibatch(
    microbatches: Iterable[Microbatch],
    forward: Callable[[Microbatch], dict[str, Tensor]],
    *,
    sums: str,
    records: BadRollouts,
    place: str,
) -> str:
    """Save a minibatch's rollouts that have non-finite numbers; return a text on these.

    If every single number is finite and only the loss or the gradient norm is not, a few rollouts
    are saved as examples, and `sums` is returned. Every rank must call this.

    Args:
        forward: repeats the network's forward pass of a micro-batch, with unchanged weights.
        sums: a text with the loss and the gradient norm.
        records: saves the rollouts.
        place: the network and the step, which are saved with each rollout.
    """
    bad: dict[str, int] = {}
    suspects: list[tuple[Rollout, dict[str, Any]]] = []
    other_rows: list[tuple[Rollout, dict[str, Any]]] = []
    num_rows = 0
    for micro in microbatches:
        rows = micro.rows
        numbers = {
            name: value
            for name, value in float_columns(rows).items()
            if value.dim() == 2 and name not in _NOT_TRAINED_ON
        }
        outputs = {name: value for name, value in forward(micro).items() if value.dim() == 2}
        numbers |= {name: value.cpu() for name, value in outputs.items()}
        # of all response tokens: a nan that carries no loss still is one in the gradient (0 * nan)
        is_token = micro.inputs.response_mask
        bad_rows = {
            name: (~torch.isfinite(value) & is_token).any(dim=1) for name, value in numbers.items()
        }
        for name, is_bad in bad_rows.items():
            bad[name] = bad.get(name, 0) + int(is_bad.sum())
        num_rows += len(rows.rollouts)
        for row, rollout in enumerate(rows.rollouts):
            names = [name for name, is_bad in bad_rows.items() if is_bad[row]]
            record = {
                "where": place,
                "not_finite": names or ["sum over tokens"],
                "is_correct": bool(rows.is_correct[row]),
                **{name: value[row] for name, value in numbers.items()},
            }
            (suspects if names else other_rows).append((rollout, record))
    counts = torch.tensor([num_rows, *bad.values()])
    num_all, *numbers_bad = sum_over_ranks(counts).tolist()
    if not any(numbers_bad):
        records.save(other_rows[:_NUM_SHOWN])
        return sums
    records.save(suspects)
    return ", ".join(
        f"{name} not finite in {number} of {num_all} rollouts"
        for name, number in zip(bad, numbers_bad, strict=True)
        if number
    )
