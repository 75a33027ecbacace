"""What the tests of trouble share: a look into the store, waiting, a sink that can be away."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient

from vapo.config.schema import TrackingConfig
from vapo.tracking.delivery import OutageError
from vapo.tracking.logger import RunLogger
from vapo.tracking.stores import locate_store


def client_of(config: TrackingConfig) -> MlflowClient:
    return MlflowClient(locate_store(config.uri).uri)


def steps_of(config: TrackingConfig, run_id: str | None, key: str = "a") -> list[int]:
    assert run_id is not None
    return [point.step for point in client_of(config).get_metric_history(run_id, key)]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Waiting:
    """A sink that can be away."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.away = True

    def send(self, records):
        if self.away:
            raise OutageError("away")
        self.taken += [record.payload for record in records]


def interrupted(config: TrackingConfig, journal: Path | None) -> RunLogger:
    logger = RunLogger(config, run_name="first", journal=journal, tags={"command": "fit"})
    logger.log_config("lr: 1\n", {"lr": 1})
    for step in range(3):
        logger.log_metrics({"a": float(step)}, step=step)
    logger.log_table([{"row": 1}], "samples/one.json")
    logger.close("FAILED")
    return logger
