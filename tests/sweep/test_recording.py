"""The parent run's table: the mean score of each row, and the best, as its runs end."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from mlflow.exceptions import MlflowException

from tests.sweep.conftest import grid, plan
from tests.tracking.ready_stores import ready_store
from vapo.commands.report import publish
from vapo.sweep.folders import Outcome
from vapo.sweep.plan import Task, describe_plan
from vapo.sweep.recording import ParentRun, metric_keys
from vapo.sweep.report.runs import Reader
from vapo.tracking.records import NOTE_TAG
from vapo.tracking.stores import locate_store

ROWS = "rows: [{row: VAPO}, {row: 'a/b, c', overrides: {algorithm.eps_low: 0.1}}]"


def test_the_parent_has_its_table_and_the_best_score(tmp_path: Path) -> None:
    uri = f"tracking.uri={ready_store(tmp_path / 'mlruns')}"
    plain = "components.value_pretraining.enabled=false"
    planned = plan(grid(tmp_path, ROWS), uri, plain, seeds=[0, 1])
    parent = ParentRun(planned, tmp_path, "vapo sweep")
    scores = {("VAPO", 0): 0.25, ("VAPO", 1): 0.5, ("a/b, c", 0): 0.5, ("a/b, c", 1): None}
    seen = []
    for (row, seed), score in scores.items():
        task = next(t for t in planned.tasks if (t.row.name, t.seed) == (row, seed))
        parent.record_end(task, Outcome("finished" if score else "failed", score=score))
        data = parent.client.get_run(parent.run_id).data
        seen.append((data.tags["best_row"], dict(data.metrics)))
    assert [best for best, _ in seen] == ["VAPO", "VAPO", "a/b, c", "a/b, c"]
    assert seen[1][1] == {"sweep/VAPO": 0.375, "sweep/best_score": 0.375}
    expected = {"sweep/VAPO": 0.375, "sweep/a_b_ c": 0.5, "sweep/best_score": 0.5}
    assert seen[-1][1] == expected
    history = parent.client.get_metric_history(parent.run_id, "sweep/best_score")
    assert [(point.step, point.value) for point in history] == [
        (1, 0.25),
        (2, 0.375),
        (3, 0.5),
        (4, 0.5),
    ]
    params = parent.client.get_run(parent.run_id).data.params
    assert params["rows"] == "VAPO, a/b, c"
    assert plain.replace("=", ": true -> ") in params["_differs"]
    assert parent.how_to_open().startswith(f"vapo ui --run {parent.run_id} --tracking_uri ")
    again = ParentRun(planned, tmp_path, "vapo sweep")
    assert again.run_id == parent.run_id, "and its params are left alone"


def two_rows(folder: Path, rows: str, notes: list[str]) -> tuple[ParentRun, list[Task]]:
    """The parent of a sweep, and the runs of its rows."""
    uri = f"tracking.uri={ready_store(folder / 'mlruns')}"
    planned = plan(grid(folder, rows), uri, "components.value_pretraining.enabled=false")
    return ParentRun(planned, folder, "vapo sweep", notes.append), list(planned.tasks)


@pytest.mark.slow
def test_a_store_that_fails_after_a_run_is_one_note_and_all_is_recorded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    rows = "rows: [{row: r0}, {row: r1, overrides: {algorithm.eps_low: 0.1}}, "
    rows += "{row: r2, overrides: {algorithm.eps_low: 0.15}}]"
    parent, tasks = two_rows(tmp_path, rows, notes)

    def fail(*args: object, **kwargs: object) -> None:
        raise MlflowException("the store is away")

    scores = [0.25, 0.5, 0.125]
    with monkeypatch.context() as away:
        away.setattr(parent.client, "log_batch", fail)
        for task, score in zip(tasks[:2], scores, strict=False):
            parent.record_end(task, Outcome("finished", score=score))
    assert len(notes) == 1
    assert "cannot be recorded" in notes[0]
    assert "the store is away" in notes[0]
    assert parent.client.get_run(parent.run_id).data.metrics == {}
    parent.record_end(tasks[2], Outcome("finished", score=scores[2]))
    expected = {f"sweep/r{i}": score for i, score in enumerate(scores)}
    metrics = parent.client.get_run(parent.run_id).data.metrics
    assert metrics == expected | {"sweep/best_score": 0.5}
    with monkeypatch.context() as away:
        away.setattr(parent.client, "log_batch", fail)
        parent.record_end(tasks[2], Outcome("finished", score=0.75))
        assert len(notes) == 2, "a new outage"
    parent.close("FINISHED")
    run = parent.client.get_run(parent.run_id)
    assert (run.info.status, run.data.metrics["sweep/r2"]) == ("FINISHED", 0.75)
    monkeypatch.setattr(parent.client, "set_terminated", fail)
    parent.close("FINISHED")
    assert len(notes) == 3


@pytest.mark.slow
def test_every_row_has_a_metric_of_its_own(tmp_path: Path) -> None:
    keys = metric_keys(["a+b", "a(b", "a_b", "best_score", "a_b_2", "c"])
    assert keys == {
        "a+b": "sweep/a_b/1",
        "a(b": "sweep/a_b/2",
        "a_b": "sweep/a_b/3",
        "best_score": "sweep/best_score/4",
        "a_b_2": "sweep/a_b_2",
        "c": "sweep/c",
    }
    dots = {"..": "sweep/_/1", ".": "sweep/_/2", "": "sweep/_/3", "a..b": "sweep/a..b"}
    assert metric_keys([*dots]) == dots, "MLflow takes no name that leads to another folder"
    rows = (
        "rows: [{row: a+b}, {row: 'a(b', overrides: {algorithm.eps_low: 0.1}}, "
        "{row: best_score, overrides: {algorithm.eps_low: 0.15}}]"
    )
    parent, tasks = two_rows(tmp_path, rows, [])
    for task, score in zip(tasks, (0.25, 0.5, 0.125), strict=True):
        parent.record_end(task, Outcome("finished", score=score))
    assert parent.client.get_run(parent.run_id).data.metrics == {
        "sweep/a_b/1": 0.25,
        "sweep/a_b/2": 0.5,
        "sweep/best_score/3": 0.125,
        "sweep/best_score": 0.5,
    }


def test_a_run_that_was_finished_before_keeps_the_score_in_its_description(tmp_path: Path) -> None:
    parent, [task] = two_rows(tmp_path, "rows: [{row: VAPO}]", [])
    run_id = parent.client.create_run(parent.experiment_id).info.run_id
    line = "held-out avg@8 52.6 % -> 90.4 % [88.6, 92.3]"
    parent.client.set_tag(run_id, "mlflow.note.content", f"{line}\n\nan earlier grid")
    done = Outcome("finished", score=0.904, mlflow_run_id=run_id, was_done=True)
    parent.record_end(task, done)
    note = parent.client.get_run(run_id).data.tags["mlflow.note.content"]
    assert note.startswith(f"{line}\n\n**VAPO**, seed 0")
    assert "an earlier grid" not in note


def test_a_server_shows_the_runs_side_by_side(tmp_path: Path) -> None:
    """Each run by its id: the experiment's page would fold them up below their parent."""
    parent, (task,) = two_rows(tmp_path, "rows: [{row: VAPO}]", [])
    assert parent.curves_page() is None, "vapo ui prints it"
    parent.store = locate_store("http://127.0.0.1:5000")
    assert parent.curves_page() is None, "no run has ended"
    parent.outcomes[task.identity] = Outcome("finished", mlflow_run_id="ab12")
    page = parent.curves_page()
    assert page is not None
    address, _, query = page.partition("?")
    assert address == "http://127.0.0.1:5000/#/metric"
    asked = {key: values[0] for key, values in parse_qs(query).items()}
    assert json.loads(asked.pop("runs")) == ["ab12"]
    assert json.loads(asked.pop("experiments")) == [parent.experiment_id]
    assert json.loads(asked.pop("metric")) == "eval/avg_at_k"
    assert json.loads(asked.pop("plot_metric_keys")) == ["eval/avg_at_k"]
    assert asked == {"x_axis": "step"}


def test_a_sweeps_description_begins_with_its_table(tmp_path: Path) -> None:
    """Also after a second report: one table, and the plan below it."""
    parent, _ = two_rows(tmp_path, "description: Our plan.\nrows: [{row: VAPO}]", [])
    report = tmp_path / "report"
    report.mkdir()
    reader = Reader(parent.store)
    for table in ("| first |", "| second |"):
        publish(reader, parent.run_id, report, table)
        note = parent.client.get_run(parent.run_id).data.tags["mlflow.note.content"]
        assert note.startswith(f"{table}\n\n## Plan\n\nOur plan.")
    assert "first" not in note
    assert note.count("## Plan") == 1


def test_a_row_s_name_is_one_line_of_plain_text_in_the_notes(tmp_path: Path) -> None:
    """Its other names are in the tests of folders, metrics and reports."""
    uri = f"tracking.uri={ready_store(tmp_path / 'mlruns')}"
    name = "a|b\n\n# <img src=x> [c](javascript:d)"
    planned = plan(grid(tmp_path, f"rows: [{{row: {json.dumps(name)}}}]"), uri, seeds=[0])
    shown = r"**a|b # \<img src=x> [c\](javascript:d)**"
    assert f"- {shown}\n" in describe_plan(planned, "vapo sweep")
    parent = ParentRun(planned, tmp_path, "vapo sweep")
    task = next(task for task in planned.tasks if not task.is_pretraining)
    assert parent.child_tags(task)[NOTE_TAG].startswith(f"{shown}, seed 0\n")
    assert parent.child_tags(task)["row"] == name
