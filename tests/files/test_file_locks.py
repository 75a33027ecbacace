"""One process at a time, and who holds a lock when its owner is gone."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vapo.errors import UserError
from vapo.files.whole_files import try_lock


def _hold(path: Path, with_children: bool, ready: Any) -> None:
    """Lock the file, start a process that inherits it, and end without that process."""
    with path.open("a") as file:
        assert try_lock(file, with_children=with_children)
        code = "import sys, time; sys.stdout.write('x'); sys.stdout.flush(); time.sleep(600)"
        child = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=(file.fileno(),), stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.read(1) == b"x"
        ready.put(child.pid)
        os._exit(9)


@pytest.mark.parametrize("with_children", [True, False])
def test_whether_a_child_keeps_the_lock(tmp_path: Path, with_children: bool) -> None:
    path = tmp_path / "lock"
    context = multiprocessing.get_context("fork")
    ready = context.SimpleQueue()
    owner = context.Process(target=_hold, args=(path, with_children, ready))
    owner.start()
    child = ready.get()
    try:
        owner.join()
        with path.open("a") as file:
            assert try_lock(file, with_children=with_children) is not with_children
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with (
        (tmp_path / "lock").open("a") as file,
        pytest.raises(UserError, match=r"lock: cannot be locked \(No locks available\); choose"),
    ):
        try_lock(file)
