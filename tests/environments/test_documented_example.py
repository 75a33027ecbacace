"""The environment of docs/environments.md, as written there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.config.fits import ROOT
from tests.environments.open_environments import play
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.environments.contract import Reply
from vapo.environments.processes import ProcessEnvironments
from vapo.environments.selection import make_environments


def test_guess_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    for name in ("guess_number.py", "guess_number.yaml"):
        block = re.search(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", page, re.DOTALL)
        assert block, name
        (tmp_path / name).write_text(block[1])
    monkeypatch.chdir(tmp_path.parent)  # the class is looked for beside the config
    files = [ROOT / "conf" / "vapo.yaml", tmp_path / "guess_number.yaml"]
    config = load_config(FitConfig, files, [])
    envs = make_environments(config)
    assert isinstance(envs, ProcessEnvironments)
    try:
        replies = play(envs, ["I say 20", "no", "40", "<answer>33</answer>"], answer="33")
    finally:
        envs.close()
    assert [(r.observation, r.reward) for r in replies] == [
        ("I think of a number from 1 to 50.", 0.0),
        ("higher", 0.0),
        ("Guess a number.", 0.0),
        ("lower", 0.0),
        (None, 1.0),
    ]
    assert replies[-1] == Reply((0,), None, 1.0)
