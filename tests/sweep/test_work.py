"""Working through a sweep: order, skip, resume, failures, threads and devices."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.sweep.conftest import grid, plan
from vapo.errors import UserError
from vapo.sweep.display import SweepDisplay
from vapo.sweep.folders import Outcome, TaskFolder, locked, pretraining_identity
from vapo.sweep.grid import choose_rows
from vapo.sweep.launch import LocalLauncher, SlurmLauncher, fit_command, visible_gpus
from vapo.sweep.plan import Plan
from vapo.sweep.work import TaskRunner

ROWS = "{full_system: VAPO, rows: [{row: VAPO}, {product: {algorithm.eps_low: [0.1]}}]}"


def work(
    planned: Plan, folder: Path, shown: io.StringIO | None = None, jobs: int = 2
) -> TaskRunner:
    return TaskRunner(
        planned.tasks,
        folder,
        LocalLauncher(jobs),
        jobs,
        prepare=lambda task, config: config,
        display=SweepDisplay(stream=shown or io.StringIO()),
    )


def starts(folder: Path) -> list[str]:
    """What the fake process was started with, over all tasks."""
    found = (path.read_text().splitlines() for path in sorted(folder.glob("runs/*/starts")))
    return [line for lines in found for line in lines]


def names(planned: Plan, outcomes: dict[str, Outcome]) -> dict[str, str]:
    return {task.name: outcomes[task.identity].state for task in planned.tasks}


@pytest.mark.slow
@pytest.mark.usefixtures("fake_fit")
def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    planned = plan(grid(tmp_path, ROWS))
    shown = io.StringIO()
    outcomes = work(planned, tmp_path, shown).run()
    assert set(names(planned, outcomes).values()) == {"finished"}
    assert len(starts(tmp_path)) == 3
    assert shown.getvalue().splitlines()[-1].startswith("[3/3] ")
    first, second = (
        next(line for line in shown.getvalue().splitlines() if line.startswith(f"[{number}/3] "))
        for number in (1, 2)
    )
    assert "; about " not in first, "a value pretraining says nothing of a row's time"
    assert "; about " in second
    again = work(planned, tmp_path, shown).run()
    assert len(starts(tmp_path)) == 3
    assert all(outcome.was_done and outcome.score == 0.5 for outcome in again.values())
    more = plan(grid(tmp_path, ROWS), seeds=[0, 1])
    work(more, tmp_path).run()
    assert len(starts(tmp_path)) == 6
    changed = plan(grid(tmp_path, ROWS), "algorithm.eps_low=0.19")
    work(changed, tmp_path).run()
    assert len(starts(tmp_path)) == 7  # only the row that the override reaches


@pytest.mark.slow
@pytest.mark.usefixtures("fake_fit")
def test_the_rest_of_the_rows_runs_later_and_nothing_twice(tmp_path: Path) -> None:
    rows = "{row: plain, overrides: {components.value_pretraining.enabled: false}}"
    whole = grid(tmp_path, ROWS.replace("]}}]}", f"]}}}}, {rows}]}}"))
    plain = plan(choose_rows(whole, ["plain"]))
    assert [task.name for task in plain.tasks] == ["plain/0"], "and no value pretraining"
    work(plain, tmp_path).run()
    one = plan(choose_rows(whole, ["eps_low 0.1"]))
    assert [task.name for task in one.tasks] == [
        "value pretraining of eps_low 0.1/0",
        "eps_low 0.1/0",
    ]
    work(one, tmp_path).run()
    assert len(starts(tmp_path)) == 3
    shown = io.StringIO()
    work(plan(whole), tmp_path, shown).run()
    assert len(starts(tmp_path)) == 4, "the other rows share the value pretraining"
    assert shown.getvalue().count(" was finished before") == 3


@pytest.mark.usefixtures("fake_fit")
def test_rows_start_from_the_critic_of_their_pretraining(tmp_path: Path) -> None:
    planned = plan(grid(tmp_path, ROWS))
    work(planned, tmp_path).run()
    [first, *rows] = planned.tasks
    critic = TaskFolder(tmp_path, first).attempts()[0] / "pretrained_critic"
    for row in rows:
        assert f"init: {critic}\n" in TaskFolder(tmp_path, row).config.read_text()
    assert pretraining_identity(str(critic)) == first.identity
    assert pretraining_identity("reward_model") is None
    assert pretraining_identity("runs/vapo/20250101-000000_x/pretrained_critic") is None


@pytest.mark.slow
@pytest.mark.usefixtures("fake_fit")
def test_a_failed_run_is_reported_and_stops_only_what_needs_it(tmp_path: Path) -> None:
    text = "rows: [{row: a}, {row: b, overrides: {components.value_pretraining.enabled: false}}]"
    planned = plan(grid(tmp_path, text), seeds=[13, 0])
    shown = io.StringIO()
    states = names(planned, work(planned, tmp_path, shown).run())
    assert states == {
        "value pretraining of a/13": "failed",
        "a/13": "blocked",
        "b/13": "failed",
        "value pretraining of a/0": "finished",
        "a/0": "finished",
        "b/0": "finished",
    }
    text = shown.getvalue()
    assert "\n    | the reward model is not there\n    | exit code 1\n    | the whole log: " in text
    failed = TaskFolder(tmp_path, planned.tasks[0])
    assert text.count(f"| the whole log: {failed.log}\n") == 1
    assert f"a/13 not started: its value pretraining failed; log: {failed.log}\n" in text
    before = len(starts(tmp_path))
    work(planned, tmp_path).run()
    assert len(starts(tmp_path)) == before + 2, "failed runs are tried again, finished ones not"


@pytest.mark.usefixtures("fake_fit")
def test_an_interrupted_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    planned = plan(grid(tmp_path, ROWS))
    folder = TaskFolder(tmp_path, planned.tasks[0])
    checkpoint = folder.output_dir / "20250101-000000_fake/checkpoints/last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    outcomes = work(planned, tmp_path).run()
    assert starts(tmp_path).count(str(checkpoint)) == 1
    resumed = [t.name for t in planned.tasks if outcomes[t.identity].was_resumed]
    assert resumed == [planned.tasks[0].name]
    assert fit_command(Path("c.yaml"), checkpoint)[-2:] == ["--ckpt_path", str(checkpoint)]


@pytest.mark.slow
@pytest.mark.usefixtures("fake_fit")
def test_an_attempt_without_a_checkpoint_is_started_again(tmp_path: Path) -> None:
    planned = plan(grid(tmp_path, ROWS))
    attempt = TaskFolder(tmp_path, planned.tasks[0]).output_dir / "20240101-000000_early"
    attempt.mkdir(parents=True)
    abandoned: list[Path] = []
    one = work(planned, tmp_path)
    one.abandoned = abandoned.append
    outcomes = one.run()
    assert abandoned == [attempt]
    assert outcomes[planned.tasks[0].identity].state == "finished"


def test_a_summary_without_a_good_end_is_not_finished(tmp_path: Path) -> None:
    planned = plan(grid(tmp_path, ROWS))
    folder = TaskFolder(tmp_path, planned.tasks[0])
    run = folder.output_dir / "20250101-000000_x"
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"score_after": 0.5}))
    assert folder.finished() is None
    assert folder.end(1, 2.0).state == "failed"
    assert folder.finished() is None
    assert folder.end(0, 2.0).state == "finished"
    assert folder.finished() is not None


@pytest.mark.slow
@pytest.mark.usefixtures("fake_fit")
def test_jobs_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vapo.sweep.launch.num_cores", lambda: 6)
    planned = plan(grid(tmp_path, ROWS), "trainer.num_threads=null")
    work(planned, tmp_path, jobs=2).run()
    for task in planned.tasks:
        assert "threads 3 3" in TaskFolder(tmp_path, task).log.read_text()


def test_jobs_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = LocalLauncher(3, gpus=["4", "5"])
    seen = [launcher.environment(slot, 1)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert seen == ["4", "5", "4"]
    four = LocalLauncher(2, gpus=["0", "1", "2", "3"])
    assert [four.environment(slot, 2)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert visible_gpus() == ["2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_one_sweep_at_a_time_in_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path) as descriptor:
        assert os.fstat(descriptor).st_size == 0
        with pytest.raises(UserError, match="another sweep"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("fake_fit")
def test_jobs_of_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its local executor: the same jobs, as processes of this host."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = SlurmLauncher(tmp_path / "jobs", {"cluster": "local", "timeout_min": "5"})
    planned = plan(grid(tmp_path, "{rows: [{row: a}]}"), seeds=[0, 13])
    one = work(planned, tmp_path)
    one.launcher = launcher
    assert names(planned, one.run()) == {
        "value pretraining of a/0": "finished",
        "a/0": "finished",
        "value pretraining of a/13": "failed",
        "a/13": "blocked",
    }
    log = TaskFolder(tmp_path, planned.tasks[2]).log.read_text()
    assert "the reward model is not there" in log


def test_slurm_without_submitit_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match="pip install 'submitit"):
        SlurmLauncher(tmp_path, {})
