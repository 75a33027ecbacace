"""The comparison on a language model in one command: its plan, its order, what it keeps."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.fits import ROOT
from vapo.config import resolve
from vapo.config.networks import LoraConfig
from vapo.sweep.grid import choose_rows, read_grid
from vapo.sweep.plan import Plan, Task, make_plan

SMOLLM2 = ROOT / "experiments/smollm2"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SMOLLM2))
    return import_module("compare")


def plan_of(name: str, *rows: str, seeds: tuple[int, ...] = (0,)) -> Plan:
    grid = choose_rows(read_grid(SMOLLM2 / f"{name}.yaml"), rows)
    return make_plan(grid, [ROOT / "conf/worked_sums/vapo.yaml"], [], seeds)


@pytest.mark.parametrize(
    ("name", "num_rows"), [("comparison", 9), ("ablation", 9), ("group_sizes", 8)]
)
def test_every_row_samples_equally_many_responses(name: str, num_rows: int) -> None:
    """Value pretraining and further sampling attempts included."""
    totals = {}
    for row, config in plan_of(name).row_configs.items():
        numbers = resolve(config)
        iterations = numbers.value_pretraining_iterations + config.training.num_iterations
        attempts = max(config.algorithm.dynamic_sampling_attempts, 1)
        totals[row] = iterations * attempts * numbers.num_prompts * numbers.group_size
    assert len(totals) == num_rows
    assert set(totals.values()) == {20 * 8 * 8}, totals


def test_what_is_trained_without_a_critic_differs_from_vapo_in_nothing_else() -> None:
    rows = plan_of("comparison").row_configs
    control, by_length, vapo = (
        rows[name]
        for name in (
            "VAPO without a critic",
            "VAPO without a critic, lambda by length",
            "VAPO",
        )
    )
    assert not control.algorithm.has_critic
    assert (resolve(control).alpha, resolve(by_length).alpha, resolve(vapo).alpha) == (
        None,
        0.5,
        0.5,
    )
    for config in (control, by_length):
        numbers, of_vapo = resolve(config), resolve(vapo)
        for name in ("mu", "eps_low", "eps_high", "num_prompts", "group_size"):
            assert getattr(numbers, name) == getattr(of_vapo, name), name
        assert config.components.token_level_loss.enabled
        assert config.algorithm.whiten_advantages
        assert config.actor == vapo.actor


def test_the_rows_that_matter_come_first_and_every_critic_before_its_runs(
    compare: ModuleType,
) -> None:
    rows = ("GRPO", "VAPO", "VAPO with a probe, trusted", "DAPO")
    plan = plan_of("comparison", *rows, seeds=(4, 5))
    ordered = compare.in_order(plan)
    assert len(ordered) == len(plan.tasks) == 12
    names = [task.name for task in ordered if not task.is_pretraining]
    first = ("GRPO", "VAPO", "VAPO with a probe, trusted")
    assert names == [f"{row}/{seed}" for seed in (4, 5) for row in first] + ["DAPO/4", "DAPO/5"]
    places = {task.identity: place for place, task in enumerate(ordered)}
    for task in ordered:
        assert task.needs is None or places[task.needs] < places[task.identity]


# ---- settings -------------------------------------------------------------------------------


def test_a_row_is_tuned_over_learning_rate_and_where_it_has_one_alpha(compare: ModuleType) -> None:
    plan = plan_of("comparison", "GRPO", "VAPO")
    tuned = import_module("tuning").tuned(plan.grid, plan)
    names = [row.name for row in tuned.rows]
    assert names[:3] == ["GRPO | lr 0.0001", "GRPO | lr 0.0002", "GRPO | lr 0.0004"]
    assert len(names) == 3 + 9
    made = make_plan(tuned, [ROOT / "conf/worked_sums/vapo.yaml"], [], (100,))
    config = made.row_configs["VAPO | lr 0.0004, alpha 0.25"]
    assert config.actor.optimizer.lr == 4.0e-4
    assert resolve(config).alpha == 0.25
    assert len([task for task in made.tasks if task.is_pretraining]) == 1  # one critic for nine


def test_the_best_settings_are_those_of_the_mean_over_seeds(compare: ModuleType) -> None:
    """0.6 in the mean against 0.5; the third lacks a seed, and the first eight batches are old."""

    def rows(settings: str, *scores: float) -> list[dict[str, Any]]:
        return [
            {"system": f"VAPO | {settings}", "seed": seed, "accuracy": [1.0] * 8 + [score] * 8}
            for seed, score in enumerate(scores)
        ]

    found = import_module("tuning").best_settings(
        rows("lr 0.0001, alpha 0.5", 0.9, 0.1)
        + rows("lr 0.0002, alpha 0.25", 0.6, 0.6)
        + rows("lr 0.0004, alpha 0.5", 0.95)
        + [{**rows("lr 0.0004", 0.2)[0], "system": "GRPO | lr 0.0004"}]
    )
    assert found == {
        "VAPO": {"actor.optimizer.lr": 2.0e-4, "components.length_adaptive_gae.alpha": 0.25},
        "GRPO": {"actor.optimizer.lr": 4.0e-4},
    }


# ---- runs -----------------------------------------------------------------------------------


class InstantJobs:
    """Each run ends at the next look, and those in `fails` fail."""

    def __init__(self, number: int, fails: tuple[str, ...] = ()) -> None:
        self.number, self.fails = number, fails
        self.running: list[Task] = []
        self.begun: list[str] = []
        self.folders: dict[str, Path] = {}
        self.most = 0

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.number

    def start(self, task: Task, config: Path) -> None:
        self.begun.append(task.name)
        self.running.append(task)
        self.most = max(self.most, len(self.running))
        self.folders[task.name] = config.parent / "run"

    def ended(self, wait_s: float) -> Iterator[tuple[Task, Any]]:
        task = self.running.pop(0)
        run = None if task.name in self.fails else self.folders[task.name]
        if run is not None:
            run.mkdir()
            (run / "summary.json").write_text("{}")
        yield task, SimpleNamespace(run=run, seconds=1.0, reason="out of memory", log="a.log")

    def end(self) -> None:
        self.running.clear()


@pytest.fixture
def comparison(compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def row_of(run: Path, system: str, pretraining: Path | None) -> dict[str, Any]:
        seed = 4
        return {
            "system": system, "seed": seed, "before": 0.5, "after": 0.75, "accuracy": [0.6],
            "from": None if pretraining is None else pretraining.parent.name,
        }  # fmt: skip

    monkeypatch.setattr(compare, "row_of", row_of)
    plan = plan_of("comparison", "GRPO", "VAPO", seeds=(4,))
    record = compare.Record(tmp_path / "toy.json", "cpu")
    return compare.Comparison(plan, tmp_path / "runs", record)


def test_a_run_waits_for_its_critic_and_is_recorded_once(
    compare: ModuleType, comparison: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = InstantJobs(3)
    assert compare.run_all(comparison, jobs, minutes=1) == []
    assert jobs.begun == ["value pretraining of VAPO/4", "GRPO/4", "VAPO/4"]
    assert jobs.most == 2
    rows = comparison.record.rows()
    assert [row["system"] for row in rows] == ["GRPO", "VAPO"]
    (needs,) = [task.needs for task in comparison.plan.tasks if task.needs is not None]
    assert (rows[1]["from"], rows[1]["device"]) == (needs, "cpu")
    assert "VAPO/4: 1 s, held out 50.0 to 75.0, fresh 60.0" in capsys.readouterr().out
    assert compare.run_all(comparison, again := InstantJobs(2), minutes=1) == []
    assert again.begun == []


def test_a_row_of_other_settings_is_not_taken_for_the_same(
    compare: ModuleType, comparison: Any
) -> None:
    compare.run_all(comparison, InstantJobs(1), minutes=1)
    rows = comparison.record.rows()
    rows[0]["settings"] = "another"
    comparison.record.path.write_text(json.dumps(rows))
    with pytest.raises(SystemExit, match="'GRPO', seed 4, with other settings: name another"):
        comparison.missing()


def test_what_fails_and_what_is_left_is_said(compare: ModuleType, comparison: Any) -> None:
    pretraining = "value pretraining of VAPO/4"
    lines = compare.run_all(comparison, InstantJobs(1, (pretraining,)), minutes=1)
    assert lines == [
        f"{pretraining}: out of memory; log: a.log",
        "VAPO/4: its value pretraining failed",
    ]
    now = iter([0.0, 1.0, *[61.0] * 9])
    (line,) = compare.run_all(comparison, InstantJobs(1), minutes=1, clock=lambda: next(now))
    assert line.startswith("not run, the time is over: ")


def test_a_process_takes_the_next_run_after_one_that_failed_and_its_death_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SMOLLM2))
    jobs = import_module("jobs").Jobs(1, tmp_path)
    task = plan_of("comparison", "GRPO").tasks[0]
    try:
        for _ in range(2):
            jobs.start(task, tmp_path / "nothing.yaml")
            assert not jobs.has_room
            while not (found := list(jobs.ended(wait_s=30))):
                pass
            ((ended, outcome),) = found
            assert ended is task
            assert outcome.run is None
            assert outcome.reason.startswith("UserError: ")
            assert "nothing.yaml" in outcome.reason
        assert jobs.num_started == 1
        assert "nothing.yaml" in outcome.log.read_text()
        os.kill(jobs.jobs[0].process.pid, signal.SIGSTOP)  # it has not read what comes now
        jobs.start(task, tmp_path / "nothing.yaml")
        jobs.jobs[0].process.kill()
        ((_, outcome),) = jobs.ended(wait_s=30)
        assert outcome.reason == "its process ended with -9"
        assert jobs.jobs == []
    finally:
        jobs.end()


# ---- kept policies --------------------------------------------------------------------------


def test_adapters_and_their_base_are_the_policy_and_several_its_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W + 2 B A of rank 1, with lora_alpha 2; the second policy's adapter is 0."""
    monkeypatch.syspath_prepend(str(SMOLLM2))
    kept = import_module("kept_policies")
    base = {"a.weight": torch.tensor([[1.0, 2.0]]), "norm.weight": torch.tensor([5.0])}
    own = {
        "a.lora_A.default.weight": torch.tensor([[0.5, -1.0]]),
        "a.lora_B.default.weight": torch.tensor([[3.0]]),
    }
    options = LoraConfig(rank=1, lora_alpha=2.0)
    found = kept.with_base(base, own, options)
    assert torch.equal(found["a.weight"], torch.tensor([[4.0, -4.0]]))
    assert torch.equal(found["norm.weight"], torch.tensor([5.0]))
    nothing = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    mean = kept.mean_policy(base, [own, nothing], options)
    assert torch.equal(mean["a.weight"], torch.tensor([[2.5, -1.0]]))
    assert torch.equal(mean["norm.weight"], torch.tensor([5.0]))


@pytest.mark.slow
def test_two_rows_run_and_are_continued(compare: ModuleType, tmp_path: Path) -> None:
    """The whole command with the default task's policy; the second call has nothing to do."""
    command = ["--toy", "--device", "cpu", "--seeds", "0", "--jobs", "1", "--policies", "1"]
    command += ["--rows", "GRPO", "VAPO, half a critic", "--folder", str(tmp_path / "runs")]
    command += ["--output", str(tmp_path / "toy.json"), str(SMOLLM2 / "comparison.yaml")]
    assert compare.main(command) == 0
    rows = json.loads((tmp_path / "toy.json").read_text())
    assert [(row["system"], row["responses"]) for row in rows] == [
        ("GRPO", 2 * 8),
        ("VAPO, half a critic", 3 * 8),
    ]
    kept = [path.name for path in sorted(tmp_path.glob("runs/*/policies/*"))]
    assert kept == ["iteration_0002.safetensors"] * 2
    assert compare.main(command) == 0
    assert json.loads((tmp_path / "toy.json").read_text()) == rows
