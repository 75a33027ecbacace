"""`vapo report FOLDER ...`: a sweep's folder or runs', and what is said where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vapo
from tests.sweep.conftest import grid, plan
from tests.tracking.ready_stores import ready_store
from vapo.cli import main
from vapo.errors import UserError
from vapo.sweep.folders import Outcome, SweepFolder, read_run_folders, read_sweep_folder
from vapo.sweep.recording import ParentRun
from vapo.tracking import known_stores
from vapo.tracking.journal import Journal
from vapo.tracking.records import Record
from vapo.tracking.sink import MlflowSink
from vapo.tracking.stores import Store, locate_store

ROWS = "{full_system: a, rows: [{row: a}, {row: b, overrides: {algorithm.eps_low: 0.1}}]}"


def sweep_folder(path: Path, uri: str | None = "mlruns", parent: str = "f00") -> Path:
    """A folder with a sweep's record, and a run that was recorded at `uri`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "sweep.json").write_text(json.dumps({"parent_run_id": parent}))
    if uri is not None:
        journal = Journal(path / "runs/a-0_123/fit/20250101-000000_a-0/tracking")
        journal.bind(uri, "one")
        journal.close()
    return path


def finished(parent: ParentRun, folder: Path, score: float) -> None:
    """One row's run in the store, and its journal in the sweep's folder."""
    task = parent.plan.tasks[0]
    experiment_id = parent.client.get_run(parent.run_id).info.experiment_id
    run_id = str(parent.client.create_run(experiment_id, tags=parent.child_tags(task)).info.run_id)
    MlflowSink(parent.client, run_id).send([Record("metrics", [["eval/avg_at_k", score, 1, 1]])])
    sweep_folder(folder, parent.store.shown_uri)
    parent.record_end(task, Outcome("finished", 1.0, score, run_id, str(folder)))


@pytest.mark.slow
def test_the_report_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, plain = tmp_path / "sweep_grid", "components.value_pretraining.enabled=false"
    folder.mkdir()
    uri = f"tracking.uri={ready_store(tmp_path / 'somewhere')}"
    parent = ParentRun(plan(grid(tmp_path, ROWS), uri, plain), folder, "vapo sweep")
    finished(parent, folder, 0.25)
    monkeypatch.chdir(tmp_path)  # where there is no mlruns
    assert main(["report", "sweep_grid"]) == 0
    said = capsys.readouterr()
    assert "| **a** | **1** | **25.0** |" in said.out
    assert said.out.splitlines()[-1] == str(folder / "report")
    assert (folder / "report/table.csv").is_file()
    artifacts = parent.client.list_artifacts(parent.run_id, "report")
    assert "report/table.md" in {file.path for file in artifacts}
    other = ready_store(tmp_path / "other")
    assert main(["report", "sweep_grid", "--tracking_uri", str(other)]) == 2
    where = f"{folder}/sweep.json: parent run {parent.run_id}: no such run in sqlite:///{other}"
    assert where in capsys.readouterr().err
    with pytest.raises(UserError, match="no such run in"):
        vapo.report(sweep_dir="sweep_grid", tracking_uri=str(other))
    assert main(["report", "--sweep", "sweep_grid", "--tracking_uri", str(other)]) == 2
    assert "; for the folder of a sweep: vapo report sweep_grid" in capsys.readouterr().err


def test_a_folder_names_the_parent_and_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep_folder(tmp_path / "one", "http://store:5000")
    monkeypatch.chdir(tmp_path)
    assert read_sweep_folder(Path("one"), None) == SweepFolder(path, "f00", "http://store:5000")
    assert read_sweep_folder(path, "mine").tracking_uri == "mine"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("runs/sweep_ablatoin", "runs/sweep_ablatoin: there is no such folder; sweeps in "
         "TMP/runs: sweep_ablation"),
        ("runs", "TMP/runs: there is no sweep.json in it, so it is not the folder of a sweep, and "
         "no tracking/target.json, so it is not that of a run; sweeps in TMP/runs: "
         "sweep_ablation, zz"),
        ("runs/sweep_ablation/runs/a-0_123", "the sweep around it is TMP/runs/sweep_ablation"),
        ("runs/sweep_ablation/sweep.json", "is not a folder; the sweep around it is TMP/runs/sw"),
        ("empty", "TMP/empty: there is no sweep.json in it, so it is not the folder of a sweep, "
         "and no tracking/target.json, so it is not that of a run; `vapo sweep` prints its folder"),
        ("runs/zz", "no run in TMP/runs/zz/runs says where it was recorded: give --tracking_uri"),
        ("broken", "TMP/broken/sweep.json is not the record of a sweep: give the id"),
        ("list", "TMP/list/sweep.json is not the record of a sweep: give the id"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong_and_where(tmp_path: Path, given: str, said: str) -> None:
    sweep_folder(tmp_path / "runs/sweep_ablation")
    sweep_folder(tmp_path / "runs/zz", None)
    for name, text in (("broken", "{"), ("list", "[]")):
        sweep_folder(tmp_path / name, None)
        (tmp_path / name / "sweep.json").write_text(text)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^FOLDER") as error:
        read_sweep_folder(tmp_path / given, None)
    assert said.replace("TMP", str(tmp_path)) in str(error.value)


def run_folder(path: Path, uri: str, run_id: str) -> Path:
    """A folder of a run that was recorded at `uri`."""
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    journal = Journal(path / "tracking")
    journal.bind(uri, run_id)
    journal.close()
    return path


def recorded_run(store: Store, name: str, score: float) -> str:
    """A finished run of this name in the store, with a held-out score."""
    client = store.client()
    run_id = str(client.create_run("0", run_name=name).info.run_id)
    points = [["eval/avg_at_k", value, 1 + at, at] for at, value in ((0, 0.1), (5, score))]
    MlflowSink(client, run_id).send([Record("metrics", points)])
    client.set_terminated(run_id)
    return run_id


def test_the_report_of_runs_folders_compares_them_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = locate_store(str(ready_store(tmp_path / "somewhere")))
    known_stores.remember_store(store)
    scores = {"grpo": 0.25, "vapo": 0.75}
    for name, score in scores.items():
        run_folder(tmp_path / "runs" / name, store.uri, recorded_run(store, name, score))
    monkeypatch.chdir(tmp_path)  # where there is no mlruns
    assert main(["report", "runs/grpo", "runs/vapo"]) == 0
    said = capsys.readouterr().out
    assert "| row | seeds | score, % | difference to grpo |" in said
    assert "| vapo | 1 | 75.0 | +50.0 |" in said
    assert said.splitlines()[-1] == str(tmp_path / "runs/report")
    assert main(["report", "runs/vapo", "runs/grpo", "--full_system", "grpo"]) == 0
    assert "| vapo | 1 | 75.0 | +50.0 |" in capsys.readouterr().out
    assert main(["report", "runs/vapo"]) == 0
    assert "| row | seeds | score, % |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        (["one", "onee"], "TMP/onee: there is no such folder; did you mean TMP/one?"),
        (["one", "sweep"], "TMP/sweep: it is the folder of a sweep, which has a report of its own"),
        (["one", "empty"], "TMP/empty: it is not the folder of a run, which has tracking/target"),
        (
            ["one", "two"],
            "different stores, and a report reads one: TMP/one in mlruns; TMP/two in x",
        ),
    ],
)
def test_several_folders_must_be_those_of_runs_in_one_store(
    tmp_path: Path, folders: list[str], said: str
) -> None:
    run_folder(tmp_path / "one", "mlruns", "f01")
    run_folder(tmp_path / "two", "x", "f02")
    sweep_folder(tmp_path / "sweep", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        read_run_folders([tmp_path / name for name in folders], None)
    assert said.replace("TMP", str(tmp_path)) in str(error.value)
    chosen = read_run_folders([tmp_path / "one", tmp_path / "two"], "mine")
    assert chosen is not None
    assert (chosen.run_ids, chosen.tracking_uri) == (["f01", "f02"], "mine")
    assert read_run_folders([tmp_path / "sweep"], None) is None
