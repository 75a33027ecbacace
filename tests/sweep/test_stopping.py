"""However a sweep ends, no run goes on without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.sweep.conftest import grid, plan
from vapo.errors import StopRequested
from vapo.sweep import work
from vapo.sweep.launch import LocalHandle, LocalLauncher
from vapo.sweep.stopping import STOP_S, SweepSignals
from vapo.system import process
from vapo.system.process import ending_signals, stop_in_good_order

WAITS = """
import os, signal, sys, time
def ask(number, frame):
    open(f"{sys.argv[1]}.asked", "w").close()
    if sys.argv[2] == "obeys":
        sys.exit(7)
signal.signal(signal.SIGINT, ask)
with open(f"{sys.argv[1]}.new", "w") as up:
    up.write(str(os.getpid()))
os.rename(up.name, f"{sys.argv[1]}.up")
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    """Where the tests themselves are, a sweep would ignore SIGHUP, as it should."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def started(folder: Path, *manners: str) -> list[LocalHandle]:
    """Runs that obey the first signal or none, once they can be asked."""
    launcher, handles = LocalLauncher(len(manners)), list[LocalHandle]()
    for number, manner in enumerate(manners):
        command = [sys.executable, "-c", WAITS, str(folder / str(number)), manner]
        handle = launcher.start("x", command, folder / "log.txt", devices=1)
        assert isinstance(handle, LocalHandle)
        wait_for((folder / f"{number}.up").exists)
        handles.append(handle)
    return handles


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: signal.Signals
) -> None:
    """Runs that are in the midst of something do not stop at the first one."""

    def command(config: Path, checkpoint: Path | None) -> list[str]:
        return [sys.executable, "-c", WAITS, str(tmp_path / config.parent.name), "refuses"]

    def send_both() -> None:
        wait_for(lambda: len(list(tmp_path.glob("*.up"))) == 2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        os.kill(os.getpid(), second)

    monkeypatch.setattr(work, "fit_command", command)
    rows = "rows: [{row: a, overrides: {components.value_pretraining.enabled: false}}]"
    planned = plan(grid(tmp_path, rows), seeds=[0, 1])
    sends, start = threading.Thread(target=send_both), time.monotonic()
    sends.start()
    started = work.TaskRunner(
        planned.tasks, tmp_path, LocalLauncher(2), 2, prepare=lambda task, config: config
    )
    with pytest.raises(KeyboardInterrupt), ending_signals(stop_in_good_order):
        started.run()
    sends.join()
    pids = [int(up.read_text()) for up in tmp_path.glob("*.up")]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert time.monotonic() - start < STOP_S - 3


def test_all_runs_are_asked_before_one_is_waited_for(tmp_path: Path) -> None:
    handles = started(tmp_path, "refuses", "obeys", "obeys")

    def kill_the_first_after_the_last() -> None:
        handles[2].process.wait()
        wait_for((tmp_path / "0.asked").exists)
        handles[0].process.kill()

    ends = threading.Thread(target=kill_the_first_after_the_last)
    ends.start()
    SweepSignals().stop(handles)
    ends.join()
    assert [handle.poll() for handle in handles] == [-signal.SIGKILL, 7, 7]
    assert len(list(tmp_path.glob("*.asked"))) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_waits_until_a_run_is_noted_down(number: signal.Signals) -> None:
    signals, noted = SweepSignals(), []
    raised = KeyboardInterrupt if number == signal.SIGINT else StopRequested

    def start() -> None:
        with signals.catching(), signals.deferred():
            os.kill(os.getpid(), number)
            noted.append("the run")

    with pytest.raises(raised):
        start()
    assert noted == ["the run"]


SWEEP = '''
import sys, time
from pathlib import Path
from vapo.sweep import launch
run = """
import sys, time
from vapo import cli
cli._dispatch = lambda argv: (open(sys.argv[1], 'w').close(), time.sleep(60))
sys.exit(cli.main([]))
"""
command = [sys.executable, "-c", run, sys.argv[1]]
if sys.argv[2] == "job":
    launch.run_logged(command, sys.argv[1] + ".log")
handle = launch.LocalLauncher(1).start("x", command, Path(sys.argv[1] + ".log"), devices=1)
time.sleep(60)
'''


@pytest.mark.parametrize("how", ["sweep", "job"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_stops_when_what_started_it_is_killed(
    tmp_path: Path, how: str, number: signal.Signals
) -> None:
    """As a run does at its next safe point; a job of a cluster may be killed alone, too."""
    up, log = tmp_path / "up", tmp_path / "up.log"
    sweep = subprocess.Popen([sys.executable, "-c", SWEEP, str(up), how])
    wait_for(up.exists)
    sweep.send_signal(number)
    sweep.wait()
    wait_for(lambda: "vapo: stopped by SIGTERM" in log.read_text(), 10)
    assert "the process that started this one has ended" in log.read_text()


def test_a_process_that_a_run_starts_is_not_asked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process.STARTER, str(os.getpid()))
    process.stop_with_starter()
    assert process.STARTER not in os.environ
