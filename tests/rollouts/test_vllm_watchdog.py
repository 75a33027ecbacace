"""The last stage: a thread stuck in native code, which no exception reaches."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.config.fits import ROOT

STUCK = """
import signal, time
from vapo.rollouts.engines.watchdog import Watchdog
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
with Watchdog(0.3, grace_s=0.3):
    time.sleep(60)
"""


def test_a_process_that_cannot_be_interrupted_is_ended() -> None:
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", STUCK], cwd=ROOT, capture_output=True, text=True, timeout=55
    )
    assert result.returncode == 2
    assert "no token for 0.3 s" in result.stderr
    assert time.monotonic() - start < 50
