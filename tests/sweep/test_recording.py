"""The parent run's table: the mean score of each row, and the best, as its runs end."""

from __future__ import annotations

from pathlib import Path

from tests.sweep.conftest import grid, plan
from tests.tracking.ready_stores import ready_store
from vapo.sweep.folders import Outcome
from vapo.sweep.recording import Parent

ROWS = "rows: [{row: VAPO}, {row: 'a/b, c', overrides: {algorithm.eps_low: 0.1}}]"


def test_the_parent_has_its_table_and_the_best_score(tmp_path: Path) -> None:
    uri = f"tracking.uri={ready_store(tmp_path / 'mlruns')}"
    plain = "components.value_pretraining.enabled=false"
    planned = plan(grid(tmp_path, ROWS), uri, plain, seeds=[0, 1])
    parent = Parent(planned, tmp_path, "vapo sweep")
    scores = {("VAPO", 0): 0.25, ("VAPO", 1): 0.5, ("a/b, c", 0): 0.5, ("a/b, c", 1): None}
    seen = []
    for (row, seed), score in scores.items():
        task = next(t for t in planned.tasks if (t.row.name, t.seed) == (row, seed))
        parent.ended(task, Outcome("finished" if score else "failed", score=score))
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
    again = Parent(planned, tmp_path, "vapo sweep")
    assert again.run_id == parent.run_id, "and its params are left alone"
