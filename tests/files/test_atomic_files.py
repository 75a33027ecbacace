"""Whatever ends the process in the middle of a change, the file, link or folder is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vapo.files.whole_files import point_link, replace_folder, write_text, write_whole


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_text(path, "one")

    def half(aside: Path) -> None:
        aside.write_text("tw")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, half)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path], "nothing is left aside"
    write_text(path, "two")
    assert path.read_text() == "two"


def test_a_link_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "last.ckpt"
    point_link(link, "one")

    def killed(self: Path, target: Any) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            point_link(link, "two")
    assert link.readlink() == Path("one")
    point_link(link, "two")
    assert link.readlink() == Path("two")


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    old, new = tmp_path / "iteration_000001", tmp_path / ".iteration_000001.new"
    for folder, name in ((old, "old"), (new, "new")):
        folder.mkdir()
        (folder / name).touch()
    replace_folder(new, old)
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert [path.name for path in old.iterdir()] == ["new"]
