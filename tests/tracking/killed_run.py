"""A run that is killed on purpose, in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from vapo.config.schema import TrackingConfig
from vapo.tracking.delivery import OutageError
from vapo.tracking.journal import Journal
from vapo.tracking.logger import RunLogger
from vapo.tracking.sink import MlflowSink

NUM_STEPS = 30


def main(uri: str, journal: str, when: str) -> int:
    logger = RunLogger(
        TrackingConfig(uri=uri, experiment="tests"),
        run_name="killed",
        journal=Path(journal),
        note=lambda text: print(text, file=sys.stderr),
    )
    print(logger.run_id, flush=True)

    def die(*args: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self: object, records: object) -> None:
        raise OutageError("away")

    if when == "sent, not marked":
        Journal.remove_oldest = die  # type: ignore[method-assign]
    else:
        MlflowSink.send = fail  # type: ignore[method-assign]
    for step in range(NUM_STEPS):
        logger.log_metrics({"a": step / 7, "b": 1.0}, step=step)
    logger.log_text("text", "notes/a.txt")
    logger.log_table([{"row": 1}], "samples/one.json")
    if when == "sent, not marked":
        logger.finalize()
    die()
    return 0
