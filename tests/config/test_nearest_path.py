"""A path that leads nowhere is answered with the one that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import ROOT
from vapo.config.layers import read_file
from vapo.config.nearest_path import nearest_path
from vapo.errors import UserError
from vapo.networks.loading import load_tokenizer


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


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"grop\.yaml: no such file; did you mean .*/grpo\.yaml\?"):
        read_file(Path("conf/algorithm/grop.yaml"))
    with pytest.raises(UserError, match=r"folder; did you mean models/state_tracking/policy\?"):
        load_tokenizer("models/state_trackin/policy")
    monkeypatch.chdir(ROOT / "docs")
    with pytest.raises(UserError, match="no such file; `vapo init` writes the shipped configs"):
        read_file(Path("conf/vapo.yaml"))
