"""How the two sides of `iterations.py`, each a process of its own, take turns.

Imports nothing beyond the standard library: it runs in the peers' environments too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Turns:
    """A side's end: `wait()` where an iteration begins, `num_tokens` set to what it sampled.

    It reports the iteration that has just ended, and returns when the next one may start. What
    the libraries print goes to the standard error.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._since: tuple[float, float] | None = None

    def wait(self) -> None:
        if self._since is not None:
            report = {
                "cpu_s": time.process_time() - self._since[0],
                "wall_s": time.perf_counter() - self._since[1],
                "tokens": self.num_tokens,
            }
            print(json.dumps(report), file=self._reports, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # the other end is done; nothing here is worth a tidy end
        self._since = time.process_time(), time.perf_counter()


class Side:
    """The other end of a side: its process, and one iteration at a time."""

    def __init__(self, python: Path | str, script: Path, settings: dict[str, Any], log: Path):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [str(python), str(script), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}
                | {"OMP_NUM_THREADS": str(settings["threads"]), "HF_HUB_OFFLINE": "1"},
            )

    def iteration(self) -> dict[str, float]:
        """Let the side run one iteration; what it took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; why is in its log
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"a side ended early; its output is in {self.log}:\n{tail}")
        report: dict[str, float] = json.loads(line)
        return report

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
