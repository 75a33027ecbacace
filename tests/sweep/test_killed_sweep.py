"""A real sweep that is killed, or told to end twice: its runs end; another resumes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.config.fits import ON_STATE_TRACKING
from tests.integration.commands import ROOT, SHORT

pytestmark = pytest.mark.kills
ROWS = "rows: [{row: base, overrides: {components.value_pretraining.enabled: false}}]"


class Sweep:
    """Two runs at a time, of many iterations."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.grid = folder, folder / "grid.yaml"
        self.grid.write_text(ROWS)

    def start(self, log: str, num_iterations: int) -> subprocess.Popen[bytes]:
        own = [f"output_dir={self.folder}/out", f"training.num_iterations={num_iterations}"]
        own += [f"tracking.uri={self.folder}/mlruns", "--sweep_dir", str(self.folder / "sweep")]
        command = [sys.executable, "-m", "vapo", "sweep", *ON_STATE_TRACKING, *SHORT, *own]
        command += ["--grid", str(self.grid), "--seeds", "0,1", "--jobs", "2", "--no_report"]
        with (self.folder / log).open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def runs(self) -> list[psutil.Process]:
        """The processes of its runs that are alive."""
        here = str(self.folder)
        running = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "fit" in words and any(word.startswith(here) for word in words):
                running.append(process)
        return running

    def wait_for_checkpoints(self) -> None:
        deadline = time.monotonic() + 240
        while len(list(self.folder.rglob("last.ckpt"))) < 2:
            assert time.monotonic() < deadline, (self.folder / "first.txt").read_text()
            time.sleep(0.1)


def test_runs_of_a_killed_sweep_stop_and_are_resumed(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    first = sweep.start("first.txt", 12)
    sweep.wait_for_checkpoints()
    assert len(sweep.runs()) == 2
    first.kill()
    first.wait()
    assert not psutil.wait_procs(sweep.runs(), timeout=30)[1]
    logs = [log.read_text() for log in tmp_path.rglob("log.txt")]
    assert all("vapo: stopped by SIGTERM; resume with" in log for log in logs), logs
    second = sweep.start("second.txt", 12)
    assert second.wait(400) == 0
    said = (tmp_path / "second.txt").read_text()
    assert said.count(" resumes from a checkpoint") == 2, said


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_no_process(tmp_path: Path, second: signal.Signals) -> None:
    sweep = Sweep(tmp_path)
    first = sweep.start("first.txt", 500)
    sweep.wait_for_checkpoints()
    everything = psutil.Process(first.pid).children(recursive=True)
    assert len(sweep.runs()) == 2
    first.send_signal(signal.SIGINT)
    time.sleep(0.1)
    first.send_signal(second)
    assert first.wait(60) == 130
    assert not psutil.wait_procs(everything, timeout=10)[1]
