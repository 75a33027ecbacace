"""Rollouts with numbers that are not finite leave before they spoil the others' advantages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.judged import judged_batch
from tests.rollout_fixtures import make_rollouts
from tests.systems import estimated, system_config
from vapo.functional.columns import bad_inputs, float_columns, select_rows
from vapo.rollouts.bad_rows import FOLDER, BadRollouts, CheckedBatch, check_batch, first_rows
from vapo.runs.summary import FAILED_EPISODES
from vapo.training.faults import Faults
from vapo.types import EvaluatedBatch

NAN, INF = float("nan"), float("inf")
G = 2
INPUTS = (
    "rewards",
    "baseline_rewards",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "old_values",
    "step_values",
)


def made_up(num: int = 8, *, system: str = "vapo") -> EvaluatedBatch:
    rollouts, verdicts = make_rollouts(num, vocab_size=30)
    batch = judged_batch(
        rollouts,
        verdicts,
        group_size=G,
        rewards=system_config(system).rewards,
        max_response_tokens=12,
    )
    draw = torch.Generator().manual_seed(3)
    shape = batch.response_mask.shape
    evaluated = EvaluatedBatch(
        **vars(batch),
        old_logprobs=-torch.rand(shape, generator=draw),
        ref_logprobs=-torch.rand(shape, generator=draw),
        old_values=torch.rand(shape, generator=draw),
    )
    return replace(
        evaluated,
        baseline_rewards=torch.rand(num, generator=draw),
        step_values=torch.rand(shape, generator=draw),
    )


def check(
    batch: EvaluatedBatch, *, by_group: bool = False, num_minibatches: int = 2
) -> CheckedBatch:
    return check_batch(
        batch,
        num_minibatches=num_minibatches,
        by_group=by_group,
        records=BadRollouts(0),
        place="iteration 1",
    )


def test_a_batch_of_finite_numbers_is_the_same_object() -> None:
    batch = made_up()
    assert batch.old_values is not None
    batch.old_values[~batch.response_mask] = NAN  # padding may hold anything
    checked = check(batch)
    assert checked.batch is batch
    assert (checked.num_rows, checked.num_left_out, checked.fault) == (8, 0, None)
    assert first_rows(batch, 8) is batch
    assert set(bad_inputs(batch)) == set(INPUTS)
    assert set(float_columns(batch)) == {*INPUTS, "turn_rewards", "unshaped_rewards"}


def test_an_entropy_takes_nothing_out() -> None:
    """It is there only where a value page is made, which must not change the training."""
    batch = made_up()
    entropy = torch.zeros(batch.response_mask.shape)
    entropy[3, 0] = NAN
    checked = check(replace(batch, old_entropy=entropy))
    assert (checked.num_rows, checked.num_left_out, checked.reason) == (8, 0, "")


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_any_number_of_a_row_that_is_not_finite_takes_it_out(name: str, value: float) -> None:
    batch = made_up()
    numbers = getattr(batch, name)
    numbers[(3, 0) if numbers.dim() == 2 else 3] = value
    checked = check(batch)
    assert checked.num_left_out == 1
    assert checked.num_rows == 6, "seven do not split into two mini-batches"
    assert checked.reason == f"{name} not finite in 1 of 8"
    assert checked.fault is None
    kept = [r.prompt.prompt_id for r in checked.batch.rollouts]
    assert kept == [f"made-up:{i}" for i in (0, 1, 2, 4, 5, 6, 7)]
    expected = select_rows(batch, [0, 1, 2, 4, 5, 6, 7])
    assert checked.batch.old_values is not None
    assert expected.old_values is not None
    assert torch.equal(checked.batch.old_values, expected.old_values)
    assert len(checked.batch.rollouts) == 7


def test_the_others_get_the_advantages_that_they_would_have_alone() -> None:
    """Without it the whitening spreads one nan over the batch: that is the negative control."""
    config = system_config("vapo")
    clean, poisoned = made_up(), made_up()
    assert poisoned.old_values is not None
    poisoned.old_values[3, 0] = NAN

    def advantages(batch: EvaluatedBatch) -> torch.Tensor:
        found = estimated(config, batch).advantages
        assert found is not None
        return found

    alone = advantages(select_rows(clean, [0, 1, 2, 4, 5, 6, 7]))
    assert torch.equal(advantages(check(poisoned).batch), alone)
    assert not torch.isfinite(advantages(poisoned)[0]).all()


def test_a_group_goes_as_a_whole_where_groups_are_compared() -> None:
    batch = made_up()
    batch.rewards[5] = NAN
    checked = check(batch, by_group=True)
    assert checked.num_left_out == 2
    assert [r.prompt.prompt_id[-1] for r in checked.batch.rollouts] == list("012367")
    assert checked.num_rows == 6


@pytest.mark.parametrize(("num_bad", "is_fault"), [(4, False), (5, True), (8, True)])
def test_more_than_half_is_too_much(num_bad: int, is_fault: bool) -> None:
    batch = made_up()
    batch.rewards[:num_bad] = INF
    checked = check(batch)
    assert (checked.fault is not None) == is_fault
    assert len(checked.batch) == (8 if is_fault else 8 - num_bad)
    if is_fault:
        assert checked.fault == f"rewards not finite in {num_bad} of 8"
        assert checked.num_rows == 8


def test_too_few_rows_for_the_minibatches_are_too_few() -> None:
    batch = made_up()
    batch.rewards[:4] = NAN
    assert check(batch, num_minibatches=4).num_rows == 4
    assert check(batch, num_minibatches=8).fault is not None


@pytest.mark.parametrize(("by_group", "counts"), [(False, (4, 2)), (True, (6, 2))])
def test_failed_episodes_are_counted_apart_from_bad_numbers(
    by_group: bool, counts: tuple[int, int]
) -> None:
    """Of four groups of two, the first has a bad number, the second both, the third failed."""
    batch = replace(made_up(16), is_lost=torch.zeros(16, dtype=torch.bool))
    groups = range(0, 16, batch.group_size)
    first, second, third, fourth, *_ = groups
    batch.rewards[[first, second]] = NAN
    batch.is_lost[[second + 1, third]] = True
    checked = check(batch, by_group=by_group)
    assert fourth in checked.rows
    faults = Faults(5, 0)
    faults.left_out(checked.num_left_out, "iteration 1", "", num_failed=checked.num_failed)
    assert (checked.num_left_out, checked.num_failed) == counts
    assert faults.pop_metrics()["faults/rollouts_left_out"] == counts[0]
    assert faults.totals == {
        "rollouts_left_out": counts[0] - counts[1],
        FAILED_EPISODES: counts[1],
    }


def test_one_line_for_iterations_in_a_row_that_leave_rollouts_out() -> None:
    faults, notes = Faults(5, 0), list[str]()
    faults.note = notes.append
    for iteration, number in enumerate([0, 2, 1, 0, 3], start=1):
        faults.left_out(number, f"iteration {iteration}", "rewards not finite in 1 of 8")
    assert [note.partition(":")[0] for note in notes] == [
        "2 rollouts left out in iteration 2",
        "3 rollouts left out in iteration 5",
    ]
    assert faults.pop_metrics()["faults/rollouts_left_out"] == 6
    assert faults.pop_metrics()["faults/rollouts_left_out"] == 0


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / FOLDER / "rank0.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_no_more_rollouts_are_written_than_allowed(tmp_path: Path) -> None:
    rollouts, _ = make_rollouts(5, vocab_size=30)
    records = BadRollouts(7)
    records.save([(rollouts[0], {})])
    assert not (tmp_path / FOLDER).exists(), "nothing before it is opened"
    records.open(tmp_path, 0)
    for _ in range(3):
        records.save([(r, {"old_values": torch.tensor([NAN, 1.0, -INF])}) for r in rollouts])
    assert len(lines(tmp_path)) == 7
    assert lines(tmp_path)[4]["old_values"] == ["nan", 1.0, "-inf"]
    again = BadRollouts(8)
    again.open(tmp_path, 0)
    again.save([(r, {}) for r in rollouts])
    assert len(lines(tmp_path)) == 8, "those of before a resume count"


def test_no_more_bytes_are_written_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vapo.rollouts.bad_rows._MAX_BYTES", 1000)
    rollouts, _ = make_rollouts(9, vocab_size=30)
    records = BadRollouts(100)
    records.open(tmp_path, 0)
    records.save([(r, {}) for r in rollouts])
    assert 500 < (tmp_path / FOLDER / "rank0.jsonl").stat().st_size <= 1000
    written = lines(tmp_path)
    assert written
    again = BadRollouts(100)
    again.open(tmp_path, 0)
    again.save([(r, {}) for r in rollouts])
    assert lines(tmp_path) == written, "those of before a resume count"
