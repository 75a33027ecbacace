"""The processes of a host's episodes, each with all that it has started.

Each episode's process is the leader of a process group, so that one signal reaches all of it that
has not left the group; and on Linux what it started and left behind becomes the episode's own
child, or the host's once the episode's process has ended. So a child of the host that is no open
episode is left over from one that has ended, and is killed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

from vapo.system.supervision import adopt_orphans, die_with_parent

SEARCH_EVERY_S = 0.2
"""What ended episodes left behind is looked for at most so often."""


class EpisodeTree:
    """Forks episodes, kills and reaps them; used by the host alone."""

    def __init__(self) -> None:
        self._host = os.getpid()
        self._pids: dict[int, int] = {}
        self._others = self._children()  # what the import of the user's module has started
        self._next_search = 0.0
        self.has_orphans = False
        """Whether something that an ended episode left behind may still run."""

    def open(self) -> tuple[int, ...]:
        """The episodes whose processes have not ended."""
        return tuple(self._pids)

    def fork(self, episode: int) -> bool:
        """Whether this is the new process of the episode; in the host, False."""
        pid = os.fork()
        with suppress(OSError):  # both do it: whoever comes first
            os.setpgid(pid, pid)
        if pid:
            self._pids[episode] = pid
            return False
        die_with_parent(self._host)
        adopt_orphans()
        return True

    def kill(self, episode: int) -> None:
        """Kill its process and its group; `reap` then finds what else there is of it."""
        pid = self._pids[episode]
        self._kill_group(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> list[int]:
        """The episodes whose processes have ended since the last call, with what they started."""
        ended = []
        episodes = {pid: episode for episode, pid in self._pids.items()}
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid not in episodes:
                    continue
                self._kill_group(pid)  # what is left of it: so long nobody else has its number
                del self._pids[episodes[pid]]
                ended.append(episodes[pid])
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
            with suppress(ProcessLookupError, PermissionError):
                if (group := os.getpgid(pid)) != os.getpgid(0):
                    os.killpg(group, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.has_orphans = bool(orphans)

    def _children(self) -> set[int]:
        return {process.pid for process in psutil.Process(self._host).children()}
