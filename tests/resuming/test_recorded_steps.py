"""A resumed run adds to MLflow's history what is not there yet, in a real store."""

from __future__ import annotations

from pathlib import Path

from vapo.config.schema import TrackingConfig
from vapo.tracking import make_run_logger


def test_repeated_steps_are_recorded_once(store: Path) -> None:
    from mlflow import MlflowClient

    tracking = TrackingConfig(uri=str(store), experiment="recorded")
    with make_run_logger(tracking, run_name="first") as logger:
        for step in (0, 1, 2):
            logger.log_metrics({"a": step + 0.5, "nan": float("nan")}, step=step)
        logger.log_metrics({"rare": 1.0}, step=1)
        run_id = logger.run_id
    assert run_id is not None
    with make_run_logger(tracking, run_name="first", run_id=run_id) as logger:
        for step in (1, 2, 3):  # from the checkpoint of step 0 on
            logger.log_metrics({"a": step + 0.5, "nan": float("nan")}, step=step)
            logger.finalize()
        logger.log_metrics({"rare": 1.0}, step=1)
        logger.log_metrics({"rare": 2.0, "new": 5.0}, step=3)
    client = MlflowClient(f"sqlite:///{store}/mlflow.db")

    def history(key: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in client.get_metric_history(run_id, key)]

    assert history("a") == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5)]
    assert [step for step, _ in history("nan")] == [0, 1, 2, 3]
    assert history("rare") == [(1, 1.0), (3, 2.0)]
    assert history("new") == [(3, 5.0)]
    assert client.get_run(run_id).info.status == "FINISHED"
