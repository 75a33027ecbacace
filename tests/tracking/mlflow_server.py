"""A real `mlflow server` that a test starts, kills and starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.builders import free_port
from tests.tracking.ready_stores import ready_store

START_S = 240.0


class Server:
    """`mlflow server` on a SQLite store in `folder`, which outlives it."""

    def __init__(
        self,
        folder: Path,
        options: Sequence[str] = (),
        *,
        log: Path | None = None,
        **variables: str,
    ) -> None:
        port = free_port()
        self.folder, self.address = ready_store(folder), f"127.0.0.1:{port}"
        self.uri = f"http://{self.address}"
        self.log = log or folder / "server.log"
        self.command = [sys.executable, "-m", "mlflow", "server", *options, "--workers", "1"]
        self.command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        self.command += ["--artifacts-destination", str(folder / "artifacts")]
        self.command += ["--host", "127.0.0.1", "--port", str(port)]
        self.environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **variables}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | self.environment,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(0.3)
        raise AssertionError("the server does not start")

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
