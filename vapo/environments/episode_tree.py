"""The processes of a host's episodes, each with all that it has started.

Each episode's process is the leader of a process group, so that one signal reaches all of it that
has not left the group; and on Linux what it started and left behind becomes the episode's own
child, or the host's once the episode's process has ended. So a child of the host that is no open
episode is left over from one that has ended, and is killed.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil

from vapo.system.supervision import adopt_orphans, die_with_parent


class EpisodeTree:
    """Forks episodes, kills and reaps them; used by the host alone."""

    def __init__(self) -> None:
        self._host = os.getpid()
        self._pids: dict[int, int] = {}
        self._others = self._children()  # what the import of the user's module has started
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
        # without its group where it could not be made: that would be the host's own
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> list[int]:
        """The episodes whose processes have ended since the last call, with what they started."""
        ended = []
        episodes = {pid: episode for episode, pid in self._pids.items()}
        with suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (found := os.waitid(os.P_ALL, 0, options)) is not None:
                if found.si_pid in episodes:
                    episode = episodes[found.si_pid]
                    self.kill(episode)  # its group, while nobody else can have its number
                    del self._pids[episode]
                    ended.append(episode)
                    self.has_orphans = True
                os.waitpid(found.si_pid, 0)
        if self.has_orphans:
            self._kill_orphans()
        return ended

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
