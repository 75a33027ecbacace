"""How much memory the host has left for this process, and the units of memory."""

from __future__ import annotations

from pathlib import Path

import psutil

MIB, GIB = 2**20, 2**30
_GROUPS = Path("/sys/fs/cgroup")
# The limit, what is used, and the statistics of a container: of version 2 and of version 1.
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_memory(groups: Path = _GROUPS) -> int:
    """Bytes that a process may still take: of the host, and of the container that it runs in.

    The host's own figures say nothing of a container's limit, over which processes are killed.

    Args:
        groups: where the system has the container's limit, as the container sees it.
    """
    return min([psutil.virtual_memory().available, *_within_limits(groups)])


def _within_limits(groups: Path) -> list[int]:
    left = []
    for limit, used, statistics, cached in _FILES:
        try:
            most, taken = (int((groups / name).read_text()) for name in (limit, used))
            lines = [line.split() for line in (groups / statistics).read_text().splitlines()]
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
        files = sum(int(line[1]) for line in lines if line[0] == cached)  # which the system drops
        left.append(max(most - taken + files, 0))
    return left
