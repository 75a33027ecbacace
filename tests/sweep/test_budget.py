"""What a dry run says of a sweep: tokens at most, counted by hand, and times that were recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.sweep.conftest import grid, plan
from vapo.sweep.describe import describe_budget, evaluation_tokens, training_tokens
from vapo.sweep.folders import TaskFolder
from vapo.sweep.plan import Plan

ROWS = "{full_system: VAPO, rows: [{row: VAPO}, {row: low, overrides: {algorithm.eps_low: 0.1}}]}"
SMALL = (
    "components.value_pretraining.num_iterations=2",
    "components.value_pretraining.min_iterations=1",
    "components.group_sampling.num_prompts=4",
    "components.group_sampling.group_size=4",
    "training.num_iterations=3",
    "training.minibatch_size=8",
    "rollouts.max_response_tokens=100",
    "data.heldout.num_examples=8",
    "evaluation.k=2",
    "evaluation.every_n_iterations=2",
)


def small(folder: Path, *overrides: str) -> Plan:
    return plan(grid(folder, ROWS), *SMALL, *overrides)


def test_tokens_at_most(tmp_path: Path) -> None:
    first, row, _ = (task.config for task in small(tmp_path).tasks)
    assert training_tokens(first) == 2 * 16 * 100
    assert training_tokens(row) == 3 * 16 * 100
    assert evaluation_tokens(first) == 1 * 8 * 2 * 100
    assert evaluation_tokens(row) == 3 * 8 * 2 * 100  # before, after 2, after the last
    whole = small(tmp_path).base
    assert training_tokens(whole) == (2 + 3) * 16 * 100


@pytest.mark.parametrize(
    ("overrides", "training", "evaluation"),
    [
        (["training.num_iterations=4"], 4 * 1600, 3 * 1600),
        (["evaluation.num_prompts=2", "evaluation.max_response_tokens=10"], 4800, 3 * 2 * 2 * 10),
        (["algorithm.advantage_estimator=group_relative",
          "algorithm.dynamic_sampling_attempts=5"], 3 * 5 * 1600, 4800),
        (["algorithm.advantage_estimator=greedy_baseline"], 3 * (16 + 4) * 100, 4800),
    ],
)  # fmt: skip
def test_tokens_of_what_else_samples(
    tmp_path: Path, overrides: list[str], training: int, evaluation: int
) -> None:
    plain = [f"components.{name}.enabled=false" for name in ("value_pretraining", "decoupled_gae")]
    config = small(tmp_path, *plain, "components.length_adaptive_gae.enabled=false", *overrides)
    row = config.tasks[0].config
    assert (training_tokens(row), evaluation_tokens(row)) == (training, evaluation)


def test_a_file_of_unknown_length_is_not_guessed(tmp_path: Path) -> None:
    sizes = [
        "training.num_iterations=3",
        "evaluation.every_n_iterations=2",
        "evaluation.k=2",
        "rollouts.max_response_tokens=100",
    ]
    config = fit_config(tmp_path, *sizes, "data.heldout={path: held.jsonl}")
    assert evaluation_tokens(config) is None
    first = fit_config(
        tmp_path, *sizes, "data.heldout={path: held.jsonl}", "evaluation.num_prompts=7"
    )
    assert evaluation_tokens(first) == 3 * 7 * 2 * 100
    known = fit_config(tmp_path, *sizes, "data.heldout={path: held.jsonl, num_examples: 3}")
    assert evaluation_tokens(known) == 3 * 3 * 2 * 100
    split = fit_config(tmp_path, *sizes, "data.heldout_size=5")
    assert evaluation_tokens(split) == 3 * 5 * 2 * 100


def test_the_dry_runs_lines(tmp_path: Path) -> None:
    planned, where = small(tmp_path), tmp_path / "sweep"
    assert describe_budget(planned, where) == [
        "At most, if every response is as long as it may be, the sampled tokens are:",
        "- 1 value pretraining: 3,200 to train on, 1,600 in evaluations",
        "- 2 runs: 9,600 to train on, 9,600 in evaluations",
        "",
        f"0 of 3 processes have finished already in {where}",
    ]
    first, row, other = (TaskFolder(where, task) for task in planned.tasks)
    for folder, seconds, was_resumed in ((first, 75.0, False), (row, 3.0, True)):
        run = folder.output_dir / "20250101-000000_x"
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"score_after": 0.5}))
        folder.end(0, seconds, was_resumed=was_resumed)
    other.path.mkdir()
    (other.path / "status.json").write_text("half a")
    assert describe_budget(planned, where)[3:] == [
        "- of these not finished, 1: 4,800 to train on, 4,800 in evaluations",
        "",
        f"2 of 3 processes have finished already in {where}",
        "",
        "How long it took before, in this folder:",
        "- value pretraining of VAPO: 1 finished, took 1:15",
    ]
    measured = small(tmp_path, "value_truth.every_n_iterations=1")
    assert "- not counted: what value_truth.every_n_iterations samples" in describe_budget(
        measured, where
    )
