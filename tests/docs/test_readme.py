"""The configs for one's own model and data, of README and of the first steps, executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.config.fits import ROOT
from tests.docs.pages import named_files
from vapo import cli
from vapo.config import FitConfig
from vapo.config.data import JsonlSource
from vapo.config.loading import load_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "my.yaml").write_text(dict(named_files())["my.yaml"])
    rows = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(50)]
    (tmp_path / "my_problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my_verifier.py").write_text(
        "def score(text, answer, metadata):\n    return text.strip() == answer\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_config_takes_nothing_of_other_data(folder: Path) -> None:
    data = load_config(FitConfig, [Path("my.yaml")], []).data
    assert data.heldout is None
    assert isinstance(data.train, JsonlSource)
    assert data.train.answer_pattern is None


def test_the_config_trains_more_than_a_moment_and_leaves_two_checkpoints_at_most(
    folder: Path,
) -> None:
    """Not the recipe's single iteration, nor a checkpoint of 3.2 GB after each."""
    config = load_config(FitConfig, [Path("my.yaml")], [])
    assert config.training.num_iterations >= 20
    assert config.rollouts.max_response_tokens >= 128
    assert config.checkpoints.keep is None  # one of so large checkpoints, and the best
    assert config.checkpoints.every_n_iterations > 1
    assert config.data.heldout_size >= 32


def test_responses_are_judged_by_its_verifier(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"response": "6", "answer": "6"}, {"response": "7", "answer": "6"}]
    (folder / "given.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert cli.main(["try", "--config", "my.yaml", "--responses", "given.jsonl"]) == 0
    assert "1 of 2 correct" in capsys.readouterr().out


def test_the_first_steps_config_takes_plain_answers_and_nothing_of_gsm8k(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_model.yaml").write_text(dict(named_files())["my_model.yaml"])
    data = load_config(FitConfig, [Path("my_model.yaml")], []).data
    assert data.heldout is None
    assert isinstance(data.train, JsonlSource)
    assert data.train.answer_pattern is None
    (folder / "my_responses.txt").write_text("1\nI get \\boxed{2}\n9\n")
    words = ["try", "--config", "my_model.yaml", "--responses", "my_responses.txt"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert "2 of 3 correct" in capsys.readouterr().out


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
