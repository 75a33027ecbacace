"""Ends everything that a user's code has started, however that code ends.

A host forks before it imports anything of the user's. The child does the work; the parent is its
supervisor and only waits. When the child has ended, or the trainer asks for it or is gone, the
supervisor kills every descendant. On Linux it adopts descendants whose own parent has ended
(`PR_SET_CHILD_SUBREAPER`). So it also finds a daemon that has left the process group and the
session. On other systems it kills the process group.
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
"""For how long the supervisor kills descendants, in seconds. Those stuck in the kernel remain."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def fork_supervised(control: int, channel: int) -> None:
    """Fork a child that does the work, and make this process its supervisor.

    The call returns only in the child. The supervisor waits, kills all descendants and exits.

    Args:
        control: a file descriptor on which the supervisor waits; a byte or its end ends everything.
        channel: a file descriptor that only the child keeps, so that the trainer's end of it closes
            with the child.
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
    """Let this process's descendants become its children when their parent ends (on Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, with this id, ends (on Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def kill_with_group(process: int) -> None:
    """Kill a process and its whole process group at once, so that none of them forks meanwhile.

    If it is in this process's own group, it alone is killed.
    """
    with suppress(ProcessLookupError, PermissionError):
        if (group := os.getpgid(process)) != os.getpgid(0):
            os.killpg(group, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _supervise(child: int, ending: list[int], wake_reader: int) -> None:
    """Wait until the child ends or one of `ending` is readable; kill all descendants; exit.

    The exit status is the child's, or 128 + the number of the signal that ended it. It is 0 if the
    child had not ended.
    """
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
    """Reap all children that have ended, adopted ones included; return the wait status of `child`.

    It is None if `child` is not among them.
    """
    status = None
    with suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            if waited[0] == child:
                status = waited[1]
    return status


def _kill_descendants(child: int) -> None:
    """Kill `child` and all other children until none is left, for at most `KILL_TIMEOUT_S`.

    The children of a killed child become this process's, so all descendants are reached.
    """
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
    """Set an option of this process, on Linux only. A refusal is ignored."""
    if sys.platform == "linux":
        arguments = (ctypes.c_ulong(value), *(ctypes.c_ulong(0) for _ in range(3)))
        ctypes.CDLL(None).prctl(ctypes.c_int(option), *arguments)
