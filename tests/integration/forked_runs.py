"""The runs of a sweep, forked from a process that has loaded the package.

A new interpreter for each would load torch, Lightning and MLflow for most of its time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tests import forked
from vapo import cli
from vapo.sweep import launch

IMPORTS_S = 8.0  # of processor time, which a process of its own would have used besides


class ForkedRun(subprocess.Popen[bytes]):
    """What a sweep asks of a run that ends by itself."""

    def __init__(self, process: ForkServerProcess) -> None:
        self.process = process

    def poll(self) -> int | None:
        return self.process.exitcode


class ForkedRuns:
    """Stands in for `subprocess` where a sweep starts its runs on this host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.started = folder, 0
        stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": self.start})
        monkeypatch.setattr(launch, "subprocess", stand_in)

    def start(
        self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: Any
    ) -> ForkedRun:
        """`command` in a process of its own."""
        assert list(command[:4]) == [sys.executable, "-P", "-m", "vapo"]
        self.started += 1
        seconds = self.folder / f"{self.started}.seconds"
        log, arguments = Path(stdout.name), list(command[4:])
        return ForkedRun(forked.start(log, env, timed, arguments, seconds))

    def cpu_seconds(self) -> float:
        """What the runs would have used of the processors as processes of their own."""
        files = list(self.folder.glob("*.seconds"))
        assert len(files) == self.started
        return sum(float(file.read_text()) + IMPORTS_S for file in files)


def timed(arguments: list[str], seconds: Path) -> int:
    """`vapo ARGUMENTS`; the processor time that it took goes into a file."""
    try:
        return cli.main(arguments)
    finally:
        seconds.write_text(str(sum(os.times()[:4])))
