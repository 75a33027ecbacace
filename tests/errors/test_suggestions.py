"""A path that leads nowhere is answered with the one that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import ROOT
from vapo.config.data import JsonlSource
from vapo.config.layers import read_file
from vapo.errors import UserError
from vapo.errors.suggestions import nearest_path
from vapo.networks.loading import load_tokenizer
from vapo.prompts.sources import check_source


def test_each_missing_part_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "models" / "tracking" / "policy.json"
    file.parent.mkdir(parents=True)
    file.touch()
    wrong = tmp_path / "model" / "trackin" / "polcy.json"
    assert nearest_path(wrong) == f"; did you mean {file}?"
    assert nearest_path(tmp_path / "models" / "tracking" / "zzz") == ""
    assert nearest_path(file / "below_a_file") == ""
    assert nearest_path(file.parent / "my_json.py") == "", (
        "two names that hardly have a part in common"
    )


@pytest.mark.parametrize("wrong", ["my_problem.jsonl", "my_problems.json", "My_problems.jsonl"])
def test_a_file_beside_it_or_in_a_folder_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    right = Path("data") / "my_problems.jsonl"
    right.parent.mkdir()
    right.touch()
    for given in (Path(wrong), Path("data") / wrong, Path("dat") / wrong):
        assert nearest_path(given) == f"; did you mean {right}?"
    assert nearest_path(Path("my_prompts.jsonl")) == "", "too far off in another folder"
    Path(".hidden").mkdir()
    (Path(".hidden") / "other.jsonl").touch()
    assert nearest_path(Path("other.jsonl")) == ""


def test_the_file_of_the_training_prompts(tmp_path: Path) -> None:
    (tmp_path / "my_problems.jsonl").touch()
    with pytest.raises(UserError, match=r"data\.train\.path: there is no file .*; did you mean"):
        check_source(JsonlSource(path=str(tmp_path / "my_problem.jsonl")), key="data.train")


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"grop\.yaml: no such file; did you mean .*/grpo\.yaml\?"):
        read_file(Path("conf/algorithm/grop.yaml"))
    with pytest.raises(UserError, match=r"folder; did you mean models/state_tracking/policy\?"):
        load_tokenizer("models/state_trackin/policy")
    monkeypatch.chdir(ROOT / "docs")
    with pytest.raises(UserError, match=r"no such file; did you mean \.\./conf/vapo\.yaml\?"):
        read_file(Path("conf/vapo.yaml"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no such file; `vapo init` writes the shipped configs"):
        read_file(Path("conf/vapo.yaml"))
