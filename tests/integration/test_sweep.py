"""A smoke-sized sweep: every row a process, then the report; at night of the whole ablation."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.config.fits import ON_STATE_TRACKING
from tests.integration.commands import ROOT, Result, vapo
from tests.integration.forked_runs import ForkedRuns
from tests.tracking.ready_stores import ready_store
from vapo.commands import report
from vapo.sweep.report.figures import Drawing, draw_all
from vapo.sweep.report.runs import Collection
from vapo.tracking.journal import read_from

# Seconds of training for each row; starting the processes takes the time.
SMOKE = [
    "components.value_pretraining.num_iterations=1",
    "components.value_pretraining.min_iterations=1",
    "components.group_sampling.num_prompts=4",
    "components.group_sampling.group_size=4",
    "training.num_iterations=2",
    "training.minibatch_size=8",
    "data.train.num_examples=64",
    "data.heldout.num_examples=4",
    "evaluation.k=1",
    "rollouts.max_response_tokens=16",
    "trainer.accelerator=cpu",
]
GRID = ROOT / "conf/sweep/ablation.yaml"


def sweep(folder: Path, grid: Path, *more: str, run: Callable[..., Result]) -> Result:
    where = [f"output_dir={folder / 'runs'}", f"tracking.uri={ready_store(folder / 'mlruns')}"]
    command = ["sweep", *ON_STATE_TRACKING, "--grid", str(grid)]
    return run(*command, *SMOKE, *where, *more)


def cpu_seconds() -> float:
    """Of this process and those that it waited for: the same on a busy host."""
    return sum(os.times()[:4])


SOME_ROWS = f"""
full_system: VAPO
rows:
  - {{row: GRPO, system: grpo, configs: [{ROOT}/conf/algorithm/grpo.yaml], paper_score: 47}}
  - row: without clip_higher
    system: vapo
    component_off: clip_higher
    paper_score: 46
    overrides: {{components.clip_higher.enabled: false}}
  - {{row: VAPO, system: vapo, paper_score: 60}}
"""


@pytest.mark.slow
def test_smoke_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = tmp_path / "some_rows.yaml"
    grid.write_text(SOME_ROWS)
    monkeypatch.setattr(report, "draw_all", of_systems)
    check_sweep(grid, tmp_path, monkeypatch, num_rows=3, num_pretrainings=1)


def of_systems(collection: Collection) -> Iterator[Drawing]:
    """One figure of each kind: a second each."""
    return (drawing for drawing in draw_all(collection) if "_components" not in drawing.name)


@pytest.mark.timeout(600)
@pytest.mark.night
def test_smoke_sweep_of_the_ablation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sweep(GRID, tmp_path, monkeypatch, num_rows=14, num_pretrainings=2)


def check_sweep(
    grid: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_rows: int,
    num_pretrainings: int,
) -> None:
    (tmp_path / "seconds").mkdir()
    runs, before = ForkedRuns(monkeypatch, tmp_path / "seconds"), cpu_seconds()
    done = sweep(tmp_path, grid, "--jobs", "2", run=vapo)
    seconds = (cpu_seconds() - before + runs.cpu_seconds()) / 2
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = Path(done.stdout.strip().splitlines()[-1])
    record = json.loads((folder / "sweep.json").read_text())
    rows = [row["row"] for row in record["rows"]]
    assert len(rows) == num_rows
    assert [run["row"] for run in record["runs"]] == rows
    assert {run["state"] for run in record["runs"]} == {"finished"}
    assert len(record["value_pretrainings"]) == num_pretrainings
    check_mlflow(tmp_path, record, num_runs=num_rows + num_pretrainings)
    again = sweep(tmp_path, grid, "--jobs", "2", "--no_report", run=vapo)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("was finished before") == num_rows + num_pretrainings
    assert " started" not in again.stdout
    # forked runs load nothing: IMPORTS_S, measured, stands for each one's start
    assert seconds < 180, f"{seconds:.0f} s on two cores; the limit is three minutes"


def check_mlflow(folder: Path, record: dict[str, Any], *, num_runs: int) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    parent = client.get_run(record["parent_run_id"])
    assert parent.info.status == "FINISHED"
    note = parent.data.tags["mlflow.note.content"]
    assert "2 policy iterations of 16 responses" in note
    assert "| row | seeds |" in note
    assert_scores_of_rows(client, parent, record)
    artifacts = {file.path for file in client.list_artifacts(parent.info.run_id, "report")}
    assert {"report/table.md", "report/table.csv", "report/report.html"} <= artifacts
    assert {f"report/training_curves_systems.{suffix}" for suffix in ("png", "svg")} <= artifacts
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.mlflow.parentRunId = '{parent.info.run_id}'"
    )
    assert len(children) == num_runs
    by_row = {run.data.tags.get("row"): run for run in children}
    one = by_row["without clip_higher"]
    assert one.info.run_name == "without clip_higher/0"
    expected = {"system": "vapo", "component_off": "clip_higher", "seed": "0", "paper_score": "46"}
    assert expected.items() <= one.data.tags.items()
    assert one.data.params["_differs"] == "components.clip_higher.enabled: true -> false"
    assert not any(key.startswith(("tracking", "output_dir")) for key in one.data.params)
    inputs = {i.tags[0].value: i.dataset for i in one.inputs.dataset_inputs}
    assert json.loads(inputs["training"].profile) == {"num_rows": 64}
    assert json.loads(inputs["evaluation"].profile) == {"num_rows": 4}
    others = {i.tags[0].value: i.dataset for i in by_row["GRPO"].inputs.dataset_inputs}
    assert {k: v.digest for k, v in others.items()} == {k: v.digest for k, v in inputs.items()}
    assert one.data.tags["model/critic"].partition(" ")[0].endswith("/pretrained_critic")
    assert "model/critic" not in by_row["GRPO"].data.tags
    check_position_table(client, one.info.run_id)


def assert_scores_of_rows(client: Any, parent: Any, record: dict[str, Any]) -> None:
    """The parent has the mean score of each row, and the best."""
    scores: dict[str, list[float]] = {}
    for run in record["runs"]:
        metrics = client.get_run(run["mlflow_run_id"]).data.metrics
        scores.setdefault(run["row"], []).append(metrics["eval/avg_at_k"])
    means = {row: sum(values) / len(values) for row, values in scores.items()}
    best = max(means.values())
    assert parent.data.metrics["sweep/best_score"] == pytest.approx(best)
    assert means[parent.data.tags["best_row"]] == pytest.approx(best)
    for row, mean in means.items():
        name = re.sub(r"[^\w. :-]", "_", row)
        assert parent.data.metrics[f"sweep/{name}"] == pytest.approx(mean)
    assert parent.data.params["rows"] == ", ".join(row["row"] for row in record["rows"])


def check_position_table(client: Any, run_id: str) -> None:
    from mlflow.artifacts import load_text

    names = [file.path for file in client.list_artifacts(run_id, "diagnostics")]
    assert names == [f"diagnostics/positions_iteration_{i:04d}.json" for i in (1, 2)]
    uri = client.get_run(run_id).info.artifact_uri
    table = json.loads(load_text(f"{uri}/{names[0]}"))
    assert (table["iteration"], table["phase"], table["policy_steps"]) == (
        1, "policy_optimization", 0,
    )  # fmt: skip
    columns = table["columns"]
    assert columns["position"][0] == 0
    assert columns["num_tokens"][0] == 16, "every response has a first token"
    assert columns["reward_weight_mean"][-1] == pytest.approx(1.0), "the last token"
    assert {len(column) for column in columns.values()} == {len(columns["position"])}


@pytest.mark.slow
def test_a_failing_row_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seconds").mkdir()
    ForkedRuns(monkeypatch, tmp_path / "seconds")
    monkeypatch.setattr(report, "draw_all", lambda collection: iter(()))
    grid = tmp_path / "grid.yaml"
    broken = shutil.copytree(ROOT / "models/state_tracking/policy", tmp_path / "broken")
    save_file(
        {"other": torch.zeros(96, 96)}, broken / "model.safetensors"
    )  # is seen when it is loaded
    grid.write_text(
        "rows:\n"
        f"  - {{row: broken, overrides: {{actor.path: {broken}, actor.optimizer.lr: 1e-5}}}}\n"
        "  - {row: whole, overrides: {components.value_pretraining.enabled: false}}\n"
    )
    done = sweep(
        tmp_path,
        grid,
        "--jobs",
        "2",
        "training.num_iterations=1",
        run=vapo,
    )
    assert done.returncode == 2
    assert f"    | vapo: {broken}" in done.stdout
    assert "broken/0 not started: its value pretraining failed" in done.stdout
    assert "whole/0 finished" in done.stdout
    assert "| whole | 1 |" in done.stdout
    assert "2 of 3 runs did not finish: value pretraining of broken/0, broken/0" in done.stderr
    [log] = tmp_path.glob("runs/sweep_grid/runs/value-pretraining-of-broken-0_*/log.txt")
    assert f"    | the whole log: {log}\n" in done.stdout
    assert done.stderr.endswith(f"\n  value pretraining of broken/0: {log}\n")
    assert f"logs: {tmp_path}/runs/sweep_grid/runs/<row>" in done.stdout
    [journal] = tmp_path.glob("runs/sweep_grid/runs/whole-0_*/fit/*/tracking")
    metrics = [item for r in read_from(journal)[0] if r.kind == "metrics" for item in r.payload]
    recorded = {key: value for key, value, *_ in metrics}
    assert recorded["progress/iteration"] == 1.0, "what the sweep's progress shows"
    assert 0 <= recorded["eval/avg_at_k"] <= 1
