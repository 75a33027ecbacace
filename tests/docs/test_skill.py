"""The skill in the package: its commands run, and the verdicts that it names exist."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ROOT
from tests.docs.test_commands_run import SMALLER
from tests.integration.commands import FEW_PROMPTS
from tests.tracking.ready_stores import ready_store
from vapo import cli
from vapo.studies.inspection import critic_verdicts, verdicts

SKILL = ROOT / "vapo/.agents/skills/vapo/SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8")


def typed() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_its_head_says_when_to_use_it() -> None:
    head = TEXT.split("---\n")[1]
    assert re.findall(r"^name: (.*)$", head, re.MULTILINE) == ["vapo"]
    (description,) = re.findall(r"^description: (.*)$", head, re.MULTILINE)
    assert "Use it for" in description
    assert len(description) <= 1024  # the format's limit


def test_the_configs_that_it_names_exist() -> None:
    named = set(re.findall(r"conf/[\w./-]+\.yaml", TEXT))
    assert len(named) > 5
    assert all((ROOT / name).is_file() for name in named)


def test_the_verdicts_that_it_names_are_said() -> None:
    source = "".join(map(inspect.getsource, (critic_verdicts, verdicts))).lower()
    rows = re.findall(r"^\| (.*?) \| ", TEXT.partition("Verdicts that it gives")[2], re.MULTILINE)
    for verdict in rows[1:6]:  # behind the head
        assert verdict in source, verdict


@pytest.mark.slow
def test_its_commands_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    smaller, ran = [*SMALLER, *FEW_PROMPTS], 0
    for program, *words in typed():
        if program == "cd":
            monkeypatch.chdir(tmp_path / words[0])
            ready_store(Path("mlruns"))
            rows = ROOT / "tests/studies/inspection/fixtures/checked_steps.jsonl"
            Path("rollouts.jsonl").write_bytes(rows.read_bytes())
            continue
        assert program == "vapo"
        own = {word.partition("=")[0] for word in words if "=" in word}
        small = [item for item in smaller if item.partition("=")[0] not in own]
        extra = {"fit": small, "validate": small, "try": FEW_PROMPTS}.get(words[0], [])
        assert cli.main([*words, *extra]) == 0, (words, capsys.readouterr().err)
        ran += 1
    assert ran >= 7
