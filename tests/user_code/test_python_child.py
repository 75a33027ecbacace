"""No Python process that a command starts executes a file of the current folder by its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vapo.cli import main
from vapo.commands import ui
from vapo.rewards.verifier_code import VerifierCode
from vapo.sweep.launch import LocalLauncher, fit_command
from vapo.tracking.stores import locate_store
from vapo.user_code import python_child
from vapo.user_code.host_process import HostProcess
from vapo.user_code.python_child import python_command, python_environment

TRAP = "import os, sys\nopen('executed', 'a').write(f'{__name__} in {sys.argv}')\nos._exit(9)\n"
NAMES = ("random", "mlflow", "vapo", "lightning", "socket", "tempfile", "uvicorn", "vllm", "yaml")


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that are named like modules of Python and of others."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(python_child.SAFE_PATH, raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_a_sweep_s_run_does_not_execute_them(trapped: Path) -> None:
    command = [*fit_command(Path("no.yaml"), None)[:-2], "--help"]
    log = trapped / "log.txt"
    handle = LocalLauncher(1).start("a/0", command, log, devices=1)
    while handle.poll() is None:
        os.sched_yield()
    assert not (trapped / "executed").exists(), (trapped / "executed").read_text()
    assert handle.poll() == 0, log.read_text()


def test_a_process_that_a_library_starts_does_not_either(trapped: Path) -> None:
    """As Lightning starts its ranks, and MLflow its server: without -P."""
    code = "import random, sys; sys.exit(random.randint(3, 3))"
    rank = [sys.executable, "-c", code]
    assert subprocess.run(rank, env=python_environment()).returncode == 3
    starts = f"import subprocess, sys; sys.exit(subprocess.run({rank!r}).returncode)"
    child = [*python_command("x")[:2], "-c", starts]
    assert subprocess.run(child, env=python_environment()).returncode == 3
    assert not (trapped / "executed").exists()


def test_python_m_vapo_does_not_either(trapped: Path) -> None:
    (
        trapped / "vapo.py"
    ).unlink()  # this name alone is Python's own choice, before any code of ours
    done = subprocess.run(
        [sys.executable, "-m", "vapo", "doctor", "--nothing"], capture_output=True, text=True
    )
    assert not (trapped / "executed").exists(), (trapped / "executed").read_text()
    assert done.returncode == 2, done.stderr
    assert "--nothing" in done.stderr


def test_in_a_command_every_child_is_started_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(python_child.SAFE_PATH, raising=False)
    seen: list[str | None] = []
    monkeypatch.setattr(
        "vapo.cli._dispatch", lambda _: seen.append(os.environ.get("PYTHONSAFEPATH"))
    )
    assert main([]) == 0
    assert seen == ["vapo"]
    assert python_child.SAFE_PATH not in os.environ
    monkeypatch.setenv(python_child.SAFE_PATH, "1")
    assert main([]) == 0
    assert seen[-1] == os.environ[python_child.SAFE_PATH] == "1"


@pytest.mark.parametrize(("mine", "theirs"), [(None, None), ("vapo", None), ("1", "1")])
def test_a_program_that_a_user_s_code_starts_is_as_usual(
    monkeypatch: pytest.MonkeyPatch, mine: str | None, theirs: str | None
) -> None:
    monkeypatch.delenv(python_child.SAFE_PATH, raising=False)
    if mine is not None:
        monkeypatch.setenv(python_child.SAFE_PATH, mine)
    popen: Any = subprocess.Popen
    given: list[dict[str, str]] = []

    def recorded(*args: Any, env: dict[str, str], **options: Any) -> Any:
        given.append(env)
        return popen(*args, env=env, **options)

    # not from /proc: the process overwrites what stands there soon after it has begun
    monkeypatch.setattr(subprocess, "Popen", recorded)
    HostProcess(VerifierCode(kind="math")).stop()
    assert [env.get(python_child.SAFE_PATH) for env in given] == [theirs]


@pytest.mark.attacks  # by day its command and its variables are read
def test_the_ui_s_server_does_not_execute_them(trapped: Path) -> None:
    """The whole way down to the process that answers requests is MLflow's own."""
    (trapped / "store").mkdir()
    (trapped / "store/mlflow.db").touch()
    command = ui.server_command(locate_store("store"), "127.0.0.1", 1)
    done = subprocess.run([*command, "--help"], env=python_environment(), capture_output=True)
    assert not (trapped / "executed").exists(), (trapped / "executed").read_text()
    assert done.returncode == 0
