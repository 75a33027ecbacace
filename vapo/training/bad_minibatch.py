"""Find the rollouts that made a minibatch's update non-finite, once an update was skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vapo.functional.columns import float_columns
from vapo.rollouts.bad_rows import BadRollouts
from vapo.system.distributed import sum_over_ranks
from vapo.training.minibatches import Microbatch
from vapo.types import Rollout

# The engine's log-probs are in every record, as they came.
_NOT_TRAINED_ON = (
    *("rollout_logprobs", "old_entropy", "raw_advantages"),
    *("turn_rewards", "token_rewards", "value_rewards"),
)
_NUM_SHOWN = 4  # rollouts of a minibatch in which no single one is bad


@torch.no_grad()
def inspect_minibatch(
    microbatches: Iterable[Microbatch],
    forward: Callable[[Microbatch], dict[str, Tensor]],
    *,
    sums: str,
    records: BadRollouts,
    place: str,
) -> str:
    """Save the rollouts with numbers that are not finite, and describe which numbers those are.

    `forward` repeats the network's forward pass of a micro-batch, with unchanged weights. It is a
    collective, so every rank must call this. Where each rollout's numbers are finite and only
    their `sums` (a text with loss and gradient norm) are not, a few rollouts are saved as examples.
    """
    bad: dict[str, int] = {}
    suspects: list[tuple[Rollout, dict[str, Any]]] = []
    others: list[tuple[Rollout, dict[str, Any]]] = []
    num_rows = 0
    for micro in microbatches:
        rows = micro.rows
        numbers = {
            name: value
            for name, value in float_columns(rows).items()
            if value.dim() == 2 and name not in _NOT_TRAINED_ON
        }
        found = {name: value for name, value in forward(micro).items() if value.dim() == 2}
        numbers |= {name: value.cpu() for name, value in found.items()}
        bad_rows = {name: _bad_rows(value, micro) for name, value in numbers.items()}
        for name, is_bad in bad_rows.items():
            bad[name] = bad.get(name, 0) + int(is_bad.sum())
        num_rows += len(rows.rollouts)
        for row, rollout in enumerate(rows.rollouts):
            names = [name for name, is_bad in bad_rows.items() if is_bad[row]]
            known = {
                "where": place,
                "not_finite": names or ["sum over tokens"],
                "is_correct": bool(rows.is_correct[row]),
                **{name: value[row] for name, value in numbers.items()},
            }
            (suspects if names else others).append((rollout, known))
    counts = torch.tensor([num_rows, *bad.values()])
    num_all, *numbers_bad = sum_over_ranks(counts).tolist()
    if not any(numbers_bad):
        records.save(others[:_NUM_SHOWN])
        return sums
    records.save(suspects)
    return ", ".join(
        f"{name} not finite in {number} of {num_all} rollouts"
        for name, number in zip(bad, numbers_bad, strict=True)
        if number
    )


def _bad_rows(value: Tensor, micro: Microbatch) -> Tensor:
    """Of all response tokens: a nan that carries no loss still is one in the gradient (0 * nan)."""
    return (~torch.isfinite(value) & micro.inputs.response_mask).any(dim=1)
