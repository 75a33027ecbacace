"""The processes of a host, each with all that it has started.

Each is the leader of a process group, so that one signal reaches all of it that has not left the
group; and on Linux what it started and left behind becomes its own child, or the host's once it
has ended. So a child of the host that is no open process is left over from one that has ended, and
is killed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

from vapo.system.supervision import adopt_orphans, die_with_parent, kill_with_group

SEARCH_EVERY_S = 0.2
"""What ended processes left behind is looked for at most so often."""


class ProcessTree:
    """Forks processes, kills and reaps them; used by the host alone."""

    def __init__(self) -> None:
        self._host = os.getpid()
        self._pids: dict[int, int] = {}
        self._others = self._children()  # what the import of the user's module has started
        self._next_search = 0.0
        self.has_orphans = False
        """Whether something that an ended process left behind may still run."""

    def open(self) -> tuple[int, ...]:
        """The numbers of the processes that have not ended."""
        return tuple(self._pids)

    def fork(self, number: int) -> bool:
        """Whether this is the new process; in the host, False."""
        pid = os.fork()
        with suppress(OSError):  # both do it: whoever comes first
            os.setpgid(pid, pid)
        if pid:
            self._pids[number] = pid
            return False
        die_with_parent(self._host)
        adopt_orphans()
        return True

    def kill(self, number: int) -> None:
        """Kill its process and its group; `reap` then finds what else there is of it."""
        pid = self._pids[number]
        self._kill_group(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> list[int]:
        """The processes that have ended since the last call, with what they started."""
        ended = []
        numbers = {pid: number for number, pid in self._pids.items()}
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid not in numbers:
                    continue
                self._kill_group(pid)  # what is left of it: so long nobody else has its number
                del self._pids[numbers[pid]]
                ended.append(numbers[pid])
                self.has_orphans = True
        if self.has_orphans and time.monotonic() >= self._next_search:
            start = time.monotonic()
            self._kill_orphans()
            now = time.monotonic()  # where there are many processes a search takes long
            self._next_search = now + max(SEARCH_EVERY_S, 10 * (now - start))
        return ended

    def _kill_group(self, pid: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _kill_orphans(self) -> None:
        orphans = self._children() - self._others - set(self._pids.values())
        for pid in orphans:
            kill_with_group(pid)
        self.has_orphans = bool(orphans)

    def _children(self) -> set[int]:
        return {process.pid for process in psutil.Process(self._host).children()}
