"""Tests in several processes count as those in one, also where one fails or its process dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
def pytest_runtestloop(session):
    from tests.shared_session import run_in_processes
    run_in_processes(session, 2)
    return True
"""
# Each waits for the other, which runs in another process.
MEETS = """
import os, time, pytest, warnings
from pathlib import Path

@pytest.fixture(scope="module")
def told():
    yield
    Path("closed{me}").touch()

def test_meets(told, tmp_path):
    warnings.warn("a warning of {me}", stacklevel=1)
    Path("met{me}").write_text(f"{{os.getpid()}} {{tmp_path.parent}}")
    while not Path("met{other}").exists():
        time.sleep(0.01)

def test_after():
    print("printed by {me}")
    {last}
"""


def pytest_in(folder: Path, *lasts: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for me, last in enumerate(lasts):
        text = MEETS.format(me=me, other=1 - me, last=last)
        (folder / f"test_{me}.py").write_text(text)
    options = ("no:cacheprovider", "no:hypothesispytest", "no:jaxtyping")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(f"-p{name}" for name in options)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_two_processes_share_the_files_and_all_is_told(tmp_path: Path) -> None:
    result = pytest_in(tmp_path, "pass", "assert 1 == 2")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    for told in ("assert 1 == 2", "printed by 1", "1 failed, 3 passed, 2 warnings"):
        assert told in result.stdout
    assert "printed by 0" not in result.stdout
    pids, folders = zip(
        *((tmp_path / f"met{i}").read_text().split() for i in range(2)), strict=True
    )
    assert len(set(pids)) == len(set(folders)) == 2
    assert (tmp_path / "closed0").exists()
    assert (tmp_path / "closed1").exists()


def test_a_process_that_ends_fails_the_session(tmp_path: Path) -> None:
    result = pytest_in(tmp_path, "time.sleep(30)", "os._exit(0 + 3)")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "a process of the tests ended with 3 in test_1.py::test_after" in result.stdout
