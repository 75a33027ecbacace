"""Paths of a YAML file: beside it first, then in the current folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vapo.config import FitConfig
from vapo.config.checkpoints import config_identity
from vapo.config.loading import load_config
from vapo.config.written import flatten, to_yaml

TEXT = """\
actor: {path: model}
critic: {init: policy}
data:
  train: {kind: jsonl, path: sub/mine.jsonl}
components: {value_pretraining: {data: kept.parquet}}
rewards: {verifier: exact}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the YAML file; the current folder is another."""
    for folder in ("there/sub", "there/model", "there/policy", "here/sub"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("there/sub/mine.jsonl", "here/sub/mine.jsonl", "here/kept.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "there/my.yaml").write_text(TEXT)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "there"


def load(place: Path, *overrides: str) -> Any:
    return load_config(FitConfig, [place / "my.yaml"], overrides)


def test_beside_the_file_then_in_the_current_folder(place: Path):
    config = load(place)
    assert config.actor.path == "../there/model"
    assert config.data.train.path == "../there/sub/mine.jsonl"  # not the one that is here
    assert config.components.value_pretraining.data == "kept.parquet"
    assert config.critic.init == "policy"  # the word, not the folder


def test_what_is_nowhere_and_hub_ids_stay(place: Path):
    (place / "my.yaml").write_text(TEXT.replace("path: model", "path: Qwen/Qwen2.5-0.5B"))
    assert load(place).actor.path == "Qwen/Qwen2.5-0.5B"


def test_the_command_line_is_the_current_folders(place: Path):
    assert load(place, "actor.path=model").actor.path == "model"


def test_a_file_that_is_extended_has_paths_of_its_own(place: Path, tmp_path: Path):
    (tmp_path / "here/mine.yaml").write_text("extends: ../there/my.yaml\nseed: 1\n")
    (tmp_path / "here/model").mkdir()
    config = load_config(FitConfig, [Path("mine.yaml")], [])
    assert config.actor.path == "../there/model"


def test_a_dollar_in_the_files_folder_is_no_interpolation(place: Path):
    moved = place.rename(place.with_name("${a}"))
    assert load(moved).actor.path == "../${a}/model"


def test_the_config_of_a_run_is_the_same_runs(place: Path):
    text = to_yaml(load(place))
    run = place / "runs/one"
    (run / "kept.parquet").mkdir(parents=True)
    (run / "run.json").touch()
    (run / "config.yaml").write_text(text)
    again: Any = load_config(FitConfig, [run / "config.yaml"], [])
    assert again.components.value_pretraining.data == "kept.parquet"  # not what lies in the run
    assert config_identity(flatten(again)) == config_identity(flatten(load(place)))
