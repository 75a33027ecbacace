"""Nothing that a user's code started outlives it, however it ends.

A host forks before it imports anything of the user's. The child does the work; the parent, its
supervisor, only waits. When the child has ended, or the trainer asks for it or is gone, it kills
every descendant. On Linux it adopts descendants whose own parent has ended
(`PR_SET_CHILD_SUBREAPER`), so a daemon that has left the process group and the session is found
too; elsewhere the process group is what is killed.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

import psutil

KILL_TIMEOUT_S = 5.0
"""It kills what the child started for this long; processes that are stuck in the kernel remain."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def fork_supervised(control: int, channel: int) -> None:
    """Return in a child process, which does the work; the caller's own process never returns.

    Args:
        control: file descriptor that the supervisor waits on; a byte or the end of it ends all.
        channel: of the child alone, so that the trainer's end of it ends with the child.
    """
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that it wakes
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    adopt_orphans()
    trainer: list[int] = []  # readable once it has ended, also while a fork of it lives on that
    with suppress(OSError, AttributeError):  # holds a copy of the control pipe; on Linux
        trainer = [os.pidfd_open(os.getppid())]
    supervisor, child = os.getpid(), os.fork()
    if child:
        os.close(channel)
        _supervise(child, [control, *trainer], wake_reader)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (control, wake_reader, wake_writer, *trainer):
        os.close(descriptor)
    die_with_parent(supervisor)


def adopt_orphans() -> None:
    """Descendants of the calling process whose own parent has ended become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the calling process killed when its parent ends, which has this id."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def kill_with_group(process: int) -> None:
    """Kill a descendant, and all of its group at once: none of it forks meanwhile."""
    with suppress(ProcessLookupError, PermissionError):
        if (group := os.getpgid(process)) != os.getpgid(0):
            os.killpg(group, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _supervise(child: int, ending: list[int], wake_reader: int) -> None:
    """Wait, kill, and exit with the child's status (128 + the signal that ended it)."""
    status = _reap(child)
    while status is None:
        readable, _, _ = select.select([*ending, wake_reader], [], [])
        if set(ending) & set(readable):
            break
        os.read(wake_reader, 4096)
        status = _reap(child)
    _kill_descendants(child)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if sys.platform != "linux":
        os.killpg(0, signal.SIGKILL)  # this process, too
    os._exit(code if code >= 0 else 128 - code)


def _reap(child: int) -> int | None:
    """The child's wait status once it has ended; adopted processes that ended are reaped too."""
    status = None
    with suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            if waited[0] == child:
                status = waited[1]
    return status


def _kill_descendants(child: int) -> None:
    """Kill the children until there are none: those of a killed one become this process's own."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        for process in psutil.Process().children():
            kill_with_group(process.pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _prctl(option: int, value: int) -> None:
    """Linux only. Where it is refused, processes that left the group are not found."""
    if sys.platform == "linux":
        arguments = (ctypes.c_ulong(value), *(ctypes.c_ulong(0) for _ in range(3)))
        ctypes.CDLL(None).prctl(ctypes.c_int(option), *arguments)
