"""Measures how much memory the host has left for this process; defines the units MIB and GIB."""

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
    """Return the bytes that the host and its container still let this process allocate.

    The host's own figures do not show a container's limit, above which processes are killed.

    Args:
        groups: the folder in which the system shows a container its limits.
    """
    return min([psutil.virtual_memory().available, *_within_limits(groups)])


def _within_limits(groups: Path) -> list[int]:
    num_free_bytes = []
    for limit, usage, statistics, cached in _FILES:
        try:
            num_allowed_bytes, num_used_bytes = (
                int((groups / name).read_text()) for name in (limit, usage)
            )
            lines = [line.split() for line in (groups / statistics).read_text().splitlines()]
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
        num_cached_bytes = sum(
            int(line[1]) for line in lines if line[0] == cached
        )  # which the system drops
        num_free_bytes.append(max(num_allowed_bytes - num_used_bytes + num_cached_bytes, 0))
    return num_free_bytes
