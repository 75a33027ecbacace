"""The memory that is left, where a container has a limit below the host's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vapo.system import host_memory
from vapo.system.host_memory import available_memory


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("memory_", "memory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=1000)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)


def test_a_containers_limit_counts_and_the_files_it_has_read_do_not(tmp_path: Path) -> None:
    """300 - (120 - 40 of files that the system may drop) = 220."""
    assert available_memory(tmp_path) == 1000
    stat = "anon 80\ninactive_file 40\nactive_file 7\n"
    write(tmp_path, memory_max="300\n", memory_current="120\n", memory_stat=stat)
    assert available_memory(tmp_path) == 220
    write(tmp_path, memory_max="max\n")
    assert available_memory(tmp_path) == 1000
    write(tmp_path, memory_max="100\n", memory_current="190\n")
    assert available_memory(tmp_path) == 0


def test_the_older_groups_count_and_a_limit_above_the_host_does_not(tmp_path: Path) -> None:
    files = {
        "memory__memory_limit_in_bytes": "500",
        "memory__memory_usage_in_bytes": "450",
        "memory__memory_stat": "inactive_file 1\ntotal_inactive_file 25\n",
    }
    write(tmp_path, **files)
    assert available_memory(tmp_path) == 75
    write(tmp_path, memory__memory_limit_in_bytes=str(2**63 - 4096))
    assert available_memory(tmp_path) == 1000
