"""The files and commands of docs/extending.md, as written there, on a small scale."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import Command, commands
from tests.docs.test_commands_run import small
from tests.integration.commands import ROOT, store
from vapo import cli

PAGE = "docs/extending.md"
FILES: dict[str, str] = dict(
    re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```", (ROOT / PAGE).read_text(), re.DOTALL)
)
MOST_LINES = 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a user would start the command; nothing imported there stays."""
    for name in ("conf", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def fits() -> list[Command]:
    return [c for c in commands() if c.page == PAGE and c.words[0] == "fit" and c.words[1] != "..."]


def test_every_file_has_its_command_and_is_short() -> None:
    assert len(FILES) == len(fits()) == 6
    for name, text in FILES.items():
        ast.parse(text)
        assert len(text.splitlines()) < MOST_LINES, name
        module = name.removesuffix(".py")
        assert [c for c in fits() if re.search(rf"={module}:\w+", " ".join(c.words))], name


@pytest.mark.usefixtures("unsent")
@pytest.mark.parametrize(
    "command",
    [
        # by day the function that reads most: it is called as the plain ones are
        pytest.param(command, id=command.words[-1], marks=() if is_of_states else pytest.mark.night)
        for command in fits()
        for is_of_states in ["my_states_estimator" in " ".join(command.words)]
    ],
)
def test_a_command_trains(command: Command, folder: Path, capsys: Any) -> None:
    few = [
        "data.train.num_examples=64",
        "data.heldout.num_examples=4",
        "rollouts.max_response_tokens=16",
    ]
    words = [*small(command), *few, f"tracking.uri={store(folder)}"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert (folder / "runs").is_dir()
