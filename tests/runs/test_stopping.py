"""What signals do to a process, and how it finds out that another one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from vapo.errors import InterruptedRunError, StopRequested
from vapo.runs.stopping import SIGNALS, Peers, Stopping
from vapo.system.progress import Progress


@pytest.mark.usefixtures("heard_hangup")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_stops_at_the_next_safe_point(name: str) -> None:
    number = signal.Signals[name]
    before = {n: signal.getsignal(n) for n in SIGNALS}
    with Stopping(60.0) as stopping:
        stopping.safe_point()
        stopping.poll()
        os.kill(os.getpid(), number)
        assert stopping.requested == number
        with pytest.raises(StopRequested):
            stopping.poll()
        with pytest.raises(StopRequested) as stopped:
            stopping.safe_point()
    codes = {"SIGHUP": 129, "SIGINT": 130, "SIGUSR1": 138, "SIGTERM": 143}
    assert stopped.value.exit_code == codes[name]
    assert {n: signal.getsignal(n) for n in SIGNALS} == before
    assert stopping._timer is not None
    assert stopping._timer.finished.is_set(), "it would end the process later"


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping(60.0) as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            stopping.safe_point()
            assert stopping.requested is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_count_that_is_reported_is_a_safe_point_too() -> None:
    with Stopping(60.0) as stopping, Progress(enabled=False) as progress:
        progress.poll = stopping.poll
        with progress.stage("rollout") as advance:
            advance(1)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(StopRequested):
                advance(1)


def without_a_safe_point(numbers: list[int], grace_s: float) -> int:
    with Stopping(grace_s):
        for number in numbers:
            os.kill(os.getpid(), number)
        time.sleep(30)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "grace_s", "said"),
    [
        ("SIGTERM", 0.5, "no safe point within 0.5 s"),
        ("SIGINT", 60.0, "SIGINT again: ending at once"),
    ],
)
def test_without_a_safe_point_the_process_ends_all_the_same(
    tmp_path: Path, name: str, grace_s: float, said: str
) -> None:
    number, log = signal.Signals[name], tmp_path / "log.txt"
    process = forked.start(log, {}, without_a_safe_point, [int(number)] * 2, grace_s)
    assert forked.end(process, timeout_s=60) == 128 + number
    assert said in log.read_text()


def test_a_lost_process_is_named() -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    peers, watched = Peers(), list(children)
    peers.watch(watched)
    assert watched == [], "Lightning's observer has nothing to watch"
    assert peers.explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    children[1].kill()
    error = peers.explain(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"))
    peers.close()
    children[0].kill()
    for child in children:
        child.communicate()
    assert isinstance(error, InterruptedRunError)
    assert error.exit_code == 75
    assert "process 2 of this run has ended (signal 9); the last checkpoint is whole" in str(error)
