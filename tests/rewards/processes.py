"""Whether a process runs, waiting for its end, and a pool's processes."""

from __future__ import annotations

import time

import psutil

from vapo.rewards.text_judge import WorkerPool


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


def workers_of(pool: WorkerPool) -> list[psutil.Process]:
    """In the order in which they were started; a host is the only child of its supervisor."""
    found: list[psutil.Process] = []
    for host in pool.processes.hosts:
        for process in psutil.Process(host.process.pid).children():
            found += process.children()
    return sorted(found, key=lambda process: process.create_time())
