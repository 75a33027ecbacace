"""What is told to type for an extra names packages, never a name on a registry that is not ours."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.config.fits import ROOT
from vapo.system import installation as extras

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ ]", text)[0].lower() for text in requirements}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_names_the_extras_own_packages(extra: str) -> None:
    said = re.findall(r"'([^']+)'", extras.install_command(extra))
    assert names(said) == names(EXTRAS[extra])


@pytest.mark.parametrize("written", ["math_verify", "math-verify"])
def test_an_extras_name_is_found_in_both_spellings(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [f'math-verify<0.10,>=0.9; extra == "{written}"', 'peft; extra == "lora"']
    monkeypatch.setattr(extras, "requires", lambda name: listed)
    assert extras.install_command("math_verify") == "pip install 'math-verify<0.10,>=0.9'"


def test_without_metadata_it_names_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", lambda name: None)
    assert extras.install_command("lora") == "pip install -e '.[lora]' in a checkout of vapo"


def test_nobody_is_told_to_install_the_name_from_a_registry() -> None:
    texts = [*(ROOT / "vapo").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [path for path in texts if re.search(r"pip install '?vapo\[", path.read_text())]
    assert not found
