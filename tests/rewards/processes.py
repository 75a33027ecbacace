"""Whether a process runs, and waiting for its end."""

from __future__ import annotations

import time

import psutil


def ends(pid: int, within_s: float = 5) -> bool:
    """Death of a killed process takes a moment on a busy machine."""
    deadline = time.monotonic() + within_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
