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


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_metadata_has_an_extras_name_as_it_is_written(extra: str) -> None:
    """Build tools write hyphens for underscores. Then pip 23.0.1, that of Debian 12, does not find
    `.[a_b]`: it warns, and installs without the extra."""
    assert re.fullmatch("[a-z-]+", extra)


def test_without_metadata_it_names_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", lambda name: None)
    assert extras.install_command("lora") == "pip install -e '.[lora]' in a checkout of vapo"


def test_nobody_is_told_to_install_the_name_from_a_registry() -> None:
    texts = [*(ROOT / "vapo").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [path for path in texts if re.search(r"pip install '?vapo\[", path.read_text())]
    assert not found
