"""The environment of docs/environments.md, as written there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.config.fits import ROOT
from tests.docs.pages import commands
from tests.environments.open_environments import environments, play
from tests.integration.commands import FEW_PROMPTS, SMALL, store
from vapo import cli
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.environments.contract import Reply
from vapo.environments.processes import ProcessEnvironments, make_environments

PAGE = "docs/environments.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user has written the page's files."""
    page = (ROOT / PAGE).read_text()
    for name, text in re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text)
    for name in ("conf", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_guess_the_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)  # the class is looked for beside the config
    config = load_config(FitConfig, [folder / "guess_number.yaml"], ["environment.args.highest=50"])
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


def test_the_demonstration_is_a_game_of_its_own_length(folder: Path) -> None:
    row = json.loads((folder / "guesses.jsonl").read_text())
    with environments(f"{folder / 'guess_number.py'}:GuessNumber", args={"highest": 5}) as envs:
        replies = play(envs, row["guesses"], answer=row["answer"])
    assert [r.observation is None for r in replies] == [*[False] * len(row["guesses"]), True]
    assert replies[-1].reward == 1


@pytest.mark.night  # by day the page's functions are played: above
def test_the_pages_commands_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand there, the training on a small scale."""
    monkeypatch.chdir(folder)
    asked = [c for c in commands() if c.page == PAGE and "guess_number.yaml" in c.words]
    assert [c.words[0] for c in asked] == ["try", "fit"]
    shown, trained = asked
    assert cli.main(shown.words) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "[environment, before turn 1]" in printed
    assert "no token for" not in printed
    few = [item for item in SMALL if item not in FEW_PROMPTS]
    few += ["components.group_sampling.num_prompts=2", "training.minibatch_size=8"]
    words = [*trained.words, *few, "training.num_iterations=1", f"tracking.uri={store(folder)}"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert "score after" in capsys.readouterr().out
