"""Remove rollouts that cannot be trained on from the batch: failed, or with bad numbers.

One nan would spread through a group's baseline and the whitening to every advantage, and through
a forward pass to every gradient. So the row is removed from the batch, not only from the loss.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vapo.functional.columns import Batch, bad_inputs, float_columns, select_rows
from vapo.rollouts.rollout_file import rollout_row
from vapo.system.distributed import max_over_ranks, sum_over_ranks
from vapo.types import EvaluatedBatch, Rollout, RolloutBatch

FOLDER = "bad_rollouts"
_MAX_BYTES = 64 * 2**20
_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_FAILED = "the environment failed"
_MOST_LEFT_OUT = 0.5  # of all rollouts; if more are left out, none is trained on


@dataclass(frozen=True)
class CheckedBatch:
    """What `check_batch` returns: a rollout batch without the rows that cannot be trained on.

    Each rank trains on `num_rows` rows of it. `rows` are the numbers of the rows of the original
    batch that are left. `num_left_out` counts the removed rows of all ranks, with whole groups if
    the estimator compares groups, and `reason` names what was wrong. `num_failed` of them have no
    bad number: their environment failed, or that of another row of their group. If `fault` is not
    None, too many rows were bad: the batch is unchanged, and none of it may be trained on.
    """

    batch: EvaluatedBatch
    num_rows: int
    rows: Sequence[int]
    num_left_out: int = 0
    num_failed: int = 0
    reason: str = ""
    fault: str | None = None

    @property
    def whole_rows(self) -> list[int]:
        """The numbers of the original batch's rows in whose groups no rollout was removed."""
        size = self.batch.group_size
        num_rows_by_group = Counter(row // size for row in self.rows)
        return [row for row in self.rows if num_rows_by_group[row // size] == size]

    def whole_groups(self, batch: Batch) -> Batch:
        """Return a batch without the groups of which `check_batch` has removed a rollout.

        Args:
            batch: the checked batch, or what a later stage has made of it.
        """
        whole = set(self.whole_rows)
        indices = [i for i, row in enumerate(self.rows) if row in whole]
        return batch if len(indices) == len(self.rows) else select_rows(batch, indices)


def check_batch(
    batch: EvaluatedBatch,
    *,
    num_minibatches: int,
    by_group: bool,
    records: BadRollouts,
    place: str,
    reads_entropies: bool = False,
) -> CheckedBatch:
    """Remove the rows of a batch that cannot be trained on. Every rank must call this.

    These are rows with a number that is not finite, which `records` saves, and episodes whose
    environment failed, because what they would have earned is not known. All ranks train on the
    same number of rows, in `num_minibatches` equal parts: `CheckedBatch.num_rows` is the largest
    number that every rank has left and that splits evenly.

    Args:
        by_group: whether the whole group of such a row is removed.
        place: says in the saved records where in the run the batch was checked.
        reads_entropies: whether the advantage estimator reads entropies, which must then be finite.
    """
    numbers = bad_inputs(batch, reads_entropies=reads_entropies)
    rows_by_problem = {f"{name} not finite": rows for name, rows in numbers.items()}
    rows_by_problem[_FAILED] = batch.is_lost
    is_bad = torch.stack(list(numbers.values())).any(dim=0)
    is_removed, has_bad_number = is_bad | batch.is_lost, is_bad
    if by_group:
        is_removed, has_bad_number = (
            rows.view(-1, batch.group_size).any(dim=1).repeat_interleave(batch.group_size)
            for rows in (is_removed, is_bad)
        )
    failed = (is_removed & ~has_bad_number).sum()
    counts = [
        is_removed.sum(),
        failed,
        torch.tensor(len(batch)),
        *(r.sum() for r in rows_by_problem.values()),
    ]
    num_left_out, num_failed, num_all, *bad = sum_over_ranks(torch.stack(counts)).tolist()
    left_out = {"num_left_out": num_left_out, "num_failed": num_failed}
    if not num_left_out:
        return CheckedBatch(batch, len(batch), range(len(batch)))
    records.save(_describe(batch, numbers, is_bad, place))
    counted = zip(rows_by_problem, bad, strict=True)
    reason = ", ".join(f"{name} in {number} of {num_all}" for name, number in counted if number)
    fewest = -int(max_over_ranks(-(~is_removed).sum()))
    num_rows = fewest // num_minibatches * num_minibatches
    if num_rows == 0 or num_left_out > _MOST_LEFT_OUT * num_all:
        rows = range(len(batch))
        return CheckedBatch(batch, len(batch), rows, reason=reason, fault=reason, **left_out)
    remaining_rows = (~is_removed).nonzero().flatten().tolist()
    return CheckedBatch(
        select_rows(batch, remaining_rows), num_rows, remaining_rows, reason=reason, **left_out
    )


def first_rows(batch: Batch, num_rows: int) -> Batch:
    return batch if num_rows == len(batch) else select_rows(batch, range(num_rows))


def _describe(
    batch: RolloutBatch, rows_by_column: dict[str, Tensor], is_bad: Tensor, place: str
) -> list[tuple[Any, dict[str, Any]]]:
    described = []
    for row in is_bad.nonzero().flatten().tolist():
        numbers: dict[str, Any] = {name: value[row] for name, value in float_columns(batch).items()}
        del numbers["rollout_logprobs"], numbers["turn_rewards"]  # they are the rollout's
        bad = [name for name, rows in rows_by_column.items() if rows[row]]
        described.append((batch.rollouts[row], {"where": place, "not_finite": bad, **numbers}))
    return described


class BadRollouts:
    """Saves removed rollouts in a run's folder, as `bad_rollouts/rank0.jsonl` for rank 0.

    Each process has one. It saves at most `max_rollouts`, and at most 64 MiB. JSON has no nan: a
    number that is not finite is written as the text "nan", "inf" or "-inf". Nothing is written
    before `open`.
    """

    def __init__(self, max_rollouts: int) -> None:
        self._num_left, self._num_bytes_left = max_rollouts, _MAX_BYTES
        self._path: Path | None = None

    def open(self, run_dir: Path, rank: int) -> None:
        """Let `save` write into the run's folder from now on.

        Rollouts that an earlier process has saved there count towards the limits.
        """
        self._path = run_dir / FOLDER / f"rank{rank}.jsonl"
        if self._path.exists():
            self._num_bytes_left -= self._path.stat().st_size
            with self._path.open() as file:
                self._num_left -= sum(1 for _ in file)

    def save(self, rollouts: Sequence[tuple[Rollout, Mapping[str, Any]]]) -> None:
        """Append each rollout with its numbers by name, which may be tensors over its tokens.

        Rollouts beyond the limits are left out, and so are all before `open`.
        """
        if self._path is None or self._num_left <= 0 or not rollouts:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            for rollout, numbers in rollouts[: self._num_left]:
                text = json.dumps(_record(rollout, numbers), default=Tensor.tolist)
                finite = json.loads(text, parse_constant=_NOT_FINITE.__getitem__)
                line = json.dumps(finite, allow_nan=False) + "\n"
                self._num_bytes_left -= len(line.encode())
                if self._num_bytes_left < 0:
                    self._num_left = 0
                    return
                file.write(line)
                self._num_left -= 1

    def describe(self) -> str:
        """Return an error's end that names the folder of the saved rollouts; '' before `open`."""
        return "" if self._path is None else f"; rollouts: {self._path.parent}"


def _record(rollout: Rollout, numbers: Mapping[str, Any]) -> dict[str, Any]:
    length = len(rollout.response_ids)
    per_token = {
        name: value[:length] if isinstance(value, Tensor) and value.dim() else value
        for name, value in numbers.items()
        if value is not None
    }
    return rollout_row(rollout) | per_token
