"""A command's own errors, and the tracebacks of its bugs, have no secret of its environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vapo import cli
from vapo.errors import StoppedRun, UserError

QUOTED = "a server says: hunter2-word, aHVudGVyMi13b3Jk, hunter2%2Dword, Authorization: Basic abc="
SHOWN = "${oc.env:DB_PASS}, ${oc.env:DB_PASS}, ${oc.env:DB_PASS}, Authorization: ***"


@pytest.mark.parametrize("kind", [UserError, StoppedRun])
def test_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def fail(argv: list[str]) -> None:
        raise kind(QUOTED)

    monkeypatch.setenv("DB_PASS", "hunter2-word")
    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["fit"]) in (2, 3)
    assert capsys.readouterr().err.endswith(f"a server says: {SHOWN}\n")


def test_what_is_no_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DB_PASS", "hunter2-word")
    assert cli.main(["hunter2-word"]) == 2
    assert "hunter2" not in capsys.readouterr().err


BUG = f"""
import sys
from vapo import cli

def fail(argv):
    raise RuntimeError({QUOTED!r})

cli._dispatch = fail
sys.exit(cli.main())
"""


def test_tracebacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUG],
        env={**os.environ, "DB_PASS": "hunter2-word"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith(f"RuntimeError: a server says: {SHOWN}\n")
