"""What a dry run says of a sweep's folder: how much has been run, and how long that took."""

from __future__ import annotations

import json
from pathlib import Path

from tests.sweep.conftest import grid, plan
from vapo.sweep.folders import TaskFolder, describe_finished

ROWS = "{full_system: VAPO, rows: [{row: VAPO}, {row: low, overrides: {algorithm.eps_low: 0.1}}]}"


def test_the_dry_runs_lines(tmp_path: Path) -> None:
    planned, where = plan(grid(tmp_path, ROWS), seeds=[0, 1]), tmp_path / "sweep"
    assert describe_finished(planned, where) == [
        f"0 of 6 processes have finished already in {where}"
    ]
    folders = {task.name: TaskFolder(where, task) for task in planned.tasks}
    for name, seconds, was_resumed in (
        ("value pretraining of VAPO/0", 75.0, False),
        ("VAPO/0", 61.0, False),
        ("VAPO/1", 130.0, False),
        ("low/0", 3.0, True),
    ):
        run = folders[name].output_dir / "20250101-000000_x"
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"score_after": 0.5}))
        folders[name].end(0, seconds, was_resumed=was_resumed)
    folders["low/1"].path.mkdir()
    (folders["low/1"].path / "status.json").write_text("half a")
    assert describe_finished(planned, where) == [
        f"4 of 6 processes have finished already in {where}",
        "",
        "How long it took before, in this folder:",
        "- value pretraining of VAPO: 1 finished, took 1:15",
        "- VAPO: 2 finished, took 1:01 to 2:10",
    ]
