"""The files that install and check the repository agree with each other."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make(*arguments: str) -> str:
    # The tests may themselves run under `make test ARGS=...`, which must not leak in.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_constraints_pin_every_dependency_inside_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 and "+" not in pin[1] for pin in pins)
    locked = {name.lower().replace("_", "-"): version for name, version in pins}
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["dev"], *extras["reasoning"]]:
        wanted = Requirement(text)
        name = wanted.name.lower().replace("_", "-")
        assert name in locked, f"{name} is not in constraints.txt: make lock"
        assert wanted.specifier.contains(locked[name]), f"{name} {locked[name]}: make lock"
    assert "vapo" not in locked


@pytest.mark.parametrize(
    "target", ["fit", "test", "lint", "types", "docs", "ui", "learning", "gpu"]
)
def test_every_command_installs_first(target: str) -> None:
    assert "pip install" in make("--dry-run", "--always-make", target)


def recipe_lines(makefile: str) -> list[str]:
    """Its commands, each that is continued in one piece with its line breaks."""
    joined = makefile.replace("\\\n", "\0")
    return [line[1:].replace("\0", "\n") for line in joined.split("\n") if line.startswith("\t")]


def test_no_target_prints_lines_of_shell() -> None:
    """Whoever types `make fit` reads what the program says. A command in one line is shown."""
    makefile = (ROOT / "Makefile").read_text()
    assert not [line for line in recipe_lines(makefile) if "\n" in line and line[0] != "@"]
    installs = recipe_lines(makefile.partition("\n$(INSTALLED): ")[2].partition("\n\n")[0])
    assert len(installs) > 5
    assert all(line.startswith("@") for line in installs)


@pytest.mark.parametrize("version", ["3.9.1", platform.python_version()])
def test_another_python_than_the_environment_s_is_not_ignored(version: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho Python {version}\n")
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    asked = ["install", f"VENV={tmp_path}", f"PYTHON={sys.executable}"]
    if version == platform.python_version():
        assert make(*asked) == ""
    else:
        with pytest.raises(subprocess.CalledProcessError) as failed:
            make(*asked)
        assert f"make: {tmp_path} has Python 3.9.1, and PYTHON is " in failed.value.stderr
    assert make("install", f"VENV={tmp_path}") == "", "whatever it has, it was not asked for"


def test_make_alone_lists_the_commands() -> None:
    listed = make()
    targets = ["help", "install", "fit", "test", "check", "lint", "types", "ui", "learning", "gpu"]
    for target in targets:
        assert re.search(rf"^  {target} +\w", listed, re.MULTILINE), target


def test_what_the_suite_leaves_out_has_a_command_of_its_own() -> None:
    """A test under a mark that no command runs would never run again."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {mark.partition(":")[0] for mark in options["markers"]} - {"slow"}
    (left_out,) = (option for option in options["addopts"] if option.startswith("-m="))
    assert set(re.findall(r"not (\w+)", left_out)) == marks
    assert set(re.findall(r"not (\w+)", make("--dry-run", "quick"))) == {*marks, "slow"}
    for mark in marks - {"vllm"}:  # its target installs the engine
        assert f"-m {mark} " in make("--dry-run", mark), mark


def test_arguments_reach_the_command() -> None:
    assert "vapo fit --config conf/vapo.yaml seed=3" in make("--dry-run", "fit", "ARGS=seed=3")


def test_the_version_is_written_once() -> None:
    assert PROJECT["dynamic"] == ["version"]  # of vapo.system.installation, as setuptools says
    assert "version" not in PROJECT


def test_agents_file_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60
