"""`vapo init`: what it writes is a folder in which the default command works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import ROOT
from vapo import cli
from vapo.config import FitConfig, resolve
from vapo.config.loading import load_config


@pytest.mark.slow
def test_the_folder_has_the_default_task_and_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "new"]) == 0
    assert "next: cd new; vapo fit --config conf/vapo.yaml" in capsys.readouterr().out
    new = tmp_path / "new"
    assert (new / "conf/vapo.yaml").read_bytes() == (ROOT / "conf/vapo.yaml").read_bytes()
    monkeypatch.chdir(new)
    for name in ("conf/vapo.yaml", "conf/missed_checks/vapo.yaml"):
        config = load_config(FitConfig, [Path(name)], [])
        for model in (config.actor.path, str(config.critic.reward_model_path)):
            assert (new / model / "model.safetensors").is_file()
    for recipe in sorted(new.glob("conf/recipes/*.yaml")):
        resolve(load_config(FitConfig, [recipe], []))
    assert sum(f.stat().st_size for f in new.rglob("*") if f.is_file()) < 4e6
    readme = (new / "README.md").read_text().splitlines()
    assert len(readme) <= 12


def test_it_may_be_written_again_but_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = str(tmp_path / "new")
    assert cli.main(["init", new]) == 0
    assert cli.main(["init", new]) == 0
    changed, missing = tmp_path / "new/conf/vapo.yaml", tmp_path / "new/conf/scale/one_gpu.yaml"
    changed.write_text("seed: 1\n")
    missing.unlink()
    assert cli.main(["init", new]) == 2
    assert "conf/vapo.yaml: there already, with other contents" in capsys.readouterr().err
    assert changed.read_text() == "seed: 1\n"
    assert not missing.exists()


def refused(capsys: pytest.CaptureFixture[str], folder: str) -> str:
    assert cli.main(["init", folder]) == 2
    return capsys.readouterr().err


def test_it_writes_through_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, outside = tmp_path / "new", tmp_path / "outside"
    for link in ("README.md", "conf", "conf/vapo.yaml"):
        (new / link).parent.mkdir(parents=True, exist_ok=True)
        (new / link).symlink_to(outside)
        assert f"{new / link} is a link" in refused(capsys, str(new))
        (new / link).unlink()
        assert not outside.exists()
    outside.mkdir()
    (new / "conf").rmdir()
    (new / "conf").symlink_to(outside)
    assert "conf is a link" in refused(capsys, str(new))
    assert list(outside.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/conf").write_text("")
    for folder in ("f", "f/sub", "dangling"):
        assert f"{folder.partition('/')[0]} is not a folder" in refused(capsys, folder)
    assert "new/conf is a file, where a folder must be" in refused(capsys, "new")
    assert "vapo init cannot write /proc/x: " in refused(capsys, "/proc/x")
    assert "File name too long" in refused(capsys, "x" * 300)
    assert "the folder has no name" in refused(capsys, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "f", "new"]


def test_the_next_command_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "a b/x"]) == 0
    assert "next: cd 'a b/x'; vapo fit" in capsys.readouterr().out
