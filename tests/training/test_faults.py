"""A number that is not finite costs its update alone, on all ranks alike, and never a weight."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Ranks
from tests.poisoned import PLAN, run
from tests.rollout_fixtures import make_rollouts
from vapo.errors import StoppedRun
from vapo.training.faults import Faults


def check_the_plan(seen: dict[str, Any], *, rows: int) -> None:
    """What every rank must have seen; `rows` is what a rank has at all."""
    steps = seen["steps"]
    assert len(steps) == 18, "two mini-batches in nine iterations, and the tenth never ended"
    skipped = {"actor": {3, 17, 18}, "critic": {6, 11}}
    for name, numbers in skipped.items():
        numbers |= {13, 14}  # iteration 7 has too few rollouts left: nothing of it is trained on
        for step in range(1, 19):
            changed = steps[step - 1]["changed"]
            expected = step not in numbers
            assert changed[name] == expected, (name, step)
            assert changed[f"{name}_adam"] == expected, (name, step)
    assert all(step["is_finite"] for step in steps)
    assert [step["global_step"] for step in steps] == list(range(1, 19))
    actor_steps = [step - len([n for n in skipped["actor"] if n <= step]) for step in range(1, 19)]
    critic_steps = [
        step - len([n for n in skipped["critic"] if n <= step]) for step in range(1, 19)
    ]
    assert [step["policy_steps"] for step in steps] == actor_steps
    expected_schedules = [list(pair) for pair in zip(actor_steps, critic_steps, strict=True)]
    assert [step["schedules"] for step in steps] == expected_schedules
    assert "actor/policy_loss" not in steps[12]["outputs"], "no forward of a faulty mini-batch"


def check_the_counts(seen: dict[str, Any], *, rows: int) -> None:
    assert [(m["faults/actor_updates_skipped"]) for m in seen["metrics"]] == [
        *(0, 1, 0, 0, 0, 0, 2, 0, 2),
    ]
    assert [m["faults/critic_updates_skipped"] for m in seen["metrics"]] == [
        *(0, 0, 1, 0, 0, 1, 2, 0, 0),
    ]
    assert [m["faults/rollouts_left_out"] for m in seen["metrics"]] == [
        *(0, 0, 0, 1, 2, 0, rows, 0, 0),
    ]
    assert seen["totals"] == {
        "actor_updates_skipped": 6,
        "critic_updates_skipped": 4,
        "rollouts_left_out": 3 + rows,
    }
    assert "3 updates of the actor in a row were not finite" in seen["stopped"]
    assert "since iteration 9, step 17: loss " in seen["stopped"]
    assert "gradient norm nan" in seen["stopped"]
    assert "bad_rollouts; the weights are as before the first of them" in seen["stopped"]
    assert seen["iterations"] == 9


def saved(folder: Path, rank: int) -> list[dict[str, Any]]:
    lines = (folder / f"bad_rollouts/rank{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def of_place(lines: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["where"] == place]


def check_the_records(folder: Path, *, rank: int, rows: int) -> None:
    lines = saved(folder, rank)
    (line,) = of_place(lines, "iteration 4")
    assert line["not_finite"] == ["old_logprobs"]
    assert line["old_logprobs"][0] == "nan"
    assert all(isinstance(value, float) for value in line["old_logprobs"][1:])
    assert line["response"] == "a response"
    assert line["prompt"].startswith("problem ")
    length = len(line["response_ids"])
    assert (
        length
        == len(line["old_logprobs"])
        == len(line["old_values"])
        == len(line["rollout_logprobs"])
    )
    first, second = of_place(lines, "iteration 5")
    assert (first["not_finite"], first["rewards"]) == (["rewards"], "nan")
    assert (second["not_finite"], second["old_values"][0]) == (["old_values"], "-inf")
    values = of_place(lines, "critic update, iteration 6, step 11")
    assert 0 < len(values) < 8, "the first of each micro-batch, and no other"
    engines = {rollout.rollout_logprobs for rollout in make_rollouts(16, vocab_size=30)[0]}
    for value in values:
        assert value["not_finite"] == ["values"]
        assert tuple(value["rollout_logprobs"]) in engines, "as they came, not rounded"
        assert value["values"][0] == "nan"
        assert len(value["advantages"]) == len(value["response_ids"])
        assert len(value["value_targets"]) == len(value["response_ids"])
    assert len(of_place(lines, "iteration 7")) == rows
    gradients = of_place(lines, "actor update, iteration 2, step 3")
    assert [line["not_finite"] for line in gradients] == [["sum over tokens"]] * 4
    assert len(gradients[0]["logprobs"]) == len(gradients[0]["response_ids"])


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    seen = run(tmp_path, 1, PLAN)
    check_the_plan(seen, rows=16)
    check_the_counts(seen, rows=16)
    check_the_records(tmp_path, rank=0, rows=16)
    told = " | ".join(seen["notes"])
    assert "actor: update skipped at iteration 2, step 3: loss " in told
    assert "1 rollouts left out in iteration 4: old_logprobs not finite in 1 of 16" in told
    assert "critic: update skipped at iteration 6, step 11: values not finite in " in told
    assert "old_values not finite in 16 of 16" in told
    assert told.count("iteration 9") == 1, "one line for a streak"


@pytest.mark.parametrize("key", ["critic.optimizer.lr", "critic.probe.lr"])
def test_the_end_names_the_rate_of_either_kind_of_critic(key: str) -> None:
    with pytest.raises(StoppedRun, match=re.escape(key)):
        Faults(max_bad_updates=1, max_saved_rollouts=0).skipped("critic", "step 1", "nan")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_sharded_processes_skip_the_same(two_ranks: Ranks, tmp_path: Path) -> None:
    """The poison is on rank 1 alone."""
    for seen in two_ranks.run(run, tmp_path, 2, PLAN, timeout_s=560):
        check_the_plan(seen, rows=8)
        check_the_counts(seen, rows=8)
    check_the_records(tmp_path, rank=1, rows=8)
    assert {line["where"] for line in saved(tmp_path, 0)} == {
        "actor update, iteration 2, step 3",
        "critic update, iteration 3, step 6",
        "actor update, iteration 9, step 17",
        "actor update, iteration 9, step 18",
        "actor update, iteration 10, step 19",
    }, "where no rollout is to blame, each rank saves a few"
