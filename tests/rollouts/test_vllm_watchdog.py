"""The last stage: a thread stuck in native code, which no exception reaches."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.config.fits import ROOT
from vapo.rollouts.engines.engine import EngineError
from vapo.rollouts.engines.watchdog import Watchdog

STUCK = """
import signal, time
from vapo.rollouts.engines.watchdog import Watchdog
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
with Watchdog(0.3, grace_s=0.3):
    time.sleep(60)
"""


@pytest.mark.attacks
def test_a_process_that_cannot_be_interrupted_is_ended() -> None:
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", STUCK], cwd=ROOT, capture_output=True, text=True, timeout=55
    )
    assert result.returncode == 2
    assert "no token for 0.3 s" in result.stderr
    assert time.monotonic() - start < 50


class Slow(Watchdog):
    """Its thread gets no time of the processor for a while, at its end or before its signal."""

    ends_after_s = 0.0

    def _watch(self) -> None:
        super()._watch()
        time.sleep(self.ends_after_s)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "vllm-watchdog"]


@pytest.mark.parametrize("hangs", [True, False])
def test_its_thread_has_ended_when_the_block_has(hangs: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    watchdog = Slow(0.2)
    watchdog.ends_after_s = 0.3
    if hangs:
        with pytest.raises(EngineError, match=r"no token for 0\.2 s"), watchdog:
            time.sleep(30)
    else:
        with watchdog:
            watchdog.heartbeat()
    assert threads() == []
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_that_comes_as_the_block_ends_interrupts_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill, asked = signal.pthread_kill, threading.Event()

    def kill_late(thread: int, number: int) -> None:
        asked.set()
        time.sleep(0.3)  # in which the block ends
        kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", kill_late)
    with Watchdog(0.1):
        assert asked.wait(10)
    time.sleep(0.5)
    assert threads() == []
