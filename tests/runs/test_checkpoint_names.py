"""What a user keeps in a run's `checkpoints`, a copy, an archive, a link, is never removed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands.test_early_checks import NOTHING
from tests.commands.test_early_checks import fit_config as parsed_config
from tests.runs.test_checkpointing import IN_BOTH_WAYS, Iterations
from tests.runs.test_manifests import write
from vapo.commands.early_checks import check_early
from vapo.errors import UserError
from vapo.files.whole_files import folder_locked, point_link, put_aside, remove, write_text
from vapo.rollouts.kept_rollouts import ResumeCache
from vapo.runs import manifests, run_dirs
from vapo.runs.manifests import (
    DamagedCheckpointError,
    checkpoint_behind,
    checkpoint_name,
    checkpoints_in,
    is_own,
    iteration_in,
    read_manifest,
    sound_checkpoint,
)
from vapo.runs.resuming import choose_resume, find_checkpoint
from vapo.runs.run_dirs import RunDir, number_of, open_run_dir


def copied(folder: Path, name: str) -> Path:
    """A user's copy of the first checkpoint, under another name."""
    shutil.copytree(folder / checkpoint_name(1), folder / name)
    return folder / name


OTHER_NAMES = (
    "iteration_000001_backup",
    "iteration_000001.tar.d",
    "iteration_000009",  # a whole name, whose manifest says iteration 1
    "iteration_0000001",
    "iteration_1",
    "iteration_\u0660\u0660\u0660\u0660\u0660\u0661",
    "iteration_000001 (copy)",
    ".iteration_000001.bak",
)


@IN_BOTH_WAYS
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_copy_stays_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool, name: str
) -> None:
    folder = tmp_path / "checkpoints"
    write(folder, 1)
    copy = copied(folder, name)
    run = Iterations(tmp_path, monkeypatch, in_background, every_n_iterations=1, keep=2)
    run.module.iteration += 1
    run.iterate(times=3)
    run.end()
    assert (copy / "state.pt").is_file()
    assert list(checkpoints_in(folder)) == [2, 3, 4], "the two newest, and the best"
    assert run.last == checkpoint_name(4)


@pytest.mark.parametrize("kind", ["file", "foreign", "bare"])
def test_what_else_has_a_whole_name_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Where the run needs the name, it is put aside; elsewhere it stays as it is."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    places = [folder / checkpoint_name(1), folder / checkpoint_name(7)]
    for place in places:
        if kind == "file":
            place.write_text("mine")
        else:
            place.mkdir()
            (place / "mine").write_text("mine")
        if kind == "foreign":
            (place / "manifest.json").write_text(json.dumps({"name": "a web page"}))
    run = Iterations(tmp_path, monkeypatch, False, every_n_iterations=1, keep=1)
    run.iterate(times=3)
    run.end()
    for place in (folder / "iteration_000001.other", places[1]):
        assert (place if kind == "file" else place / "mine").read_text() == "mine"
    assert 3 in checkpoints_in(folder)


@IN_BOTH_WAYS
def test_a_link_to_a_larger_disk_is_unlinked_and_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    folder, large = tmp_path / "checkpoints", tmp_path / "large"
    moved = write(folder, 1)
    large.mkdir()
    moved.rename(large / moved.name)
    moved.symlink_to(large / moved.name)
    (folder / ".iteration_000003.new").symlink_to(large)
    (folder / "iteration_000004").symlink_to(tmp_path / "nowhere")
    run = Iterations(tmp_path, monkeypatch, in_background, every_n_iterations=1, keep=1)
    run.module.iteration += 1
    run.iterate(times=3)
    run.end()
    assert (large / moved.name / "state.pt").is_file()
    assert not os.path.lexists(moved)
    assert any(str(large / moved.name) in note for note in run.notes)
    assert list(checkpoints_in(folder)) == [2, 4]


@IN_BOTH_WAYS
def test_trouble_in_tidying_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    run = Iterations(tmp_path, monkeypatch, in_background, every_n_iterations=1, keep=1)
    monkeypatch.setattr("vapo.training.callbacks.checkpointing.remove", refuse)
    run.iterate(0.5)
    run.iterate(0.9, times=1)
    monkeypatch.setattr(run.callback.rollout_cache, "forget", lambda first_kept: refuse(tmp_path))
    run.iterate(0.1, times=2)
    run.end()
    assert run.last == checkpoint_name(4)
    said = [note for note in run.notes if "cannot remove" in note]
    assert any("iteration_000001" in note and "Permission denied" in note for note in said)
    assert any(note.startswith("rollouts/") for note in said)


def test_a_manifest_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    checkpoint = write(tmp_path, 1)
    assert is_own(checkpoint)
    monkeypatch.setattr(manifests, "_contents", refuse)
    assert not is_own(checkpoint)
    with pytest.raises(DamagedCheckpointError, match="cannot be read: Permission denied"):
        read_manifest(checkpoint)


def test_links_that_a_copying_tool_has_made_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    write(folder, 1)
    (folder / "last.ckpt").unlink()
    last = copied(folder, "last.ckpt")
    assert sound_checkpoint(last, pytest.fail) == last
    (last / "state.pt").write_bytes(b"")
    assert sound_checkpoint(last, lambda text: None) == folder / checkpoint_name(1)
    run = Iterations(tmp_path, monkeypatch, False, every_n_iterations=1)
    run.module.iteration += 1
    run.iterate()
    run.end()
    assert (run.last, (folder / "last.ckpt").is_symlink()) == (checkpoint_name(2), True)
    assert (folder / "last.ckpt.other/manifest.json").is_file()


def test_more_than_a_million_iterations_are_in_their_order(tmp_path: Path) -> None:
    for iteration in (999_999, 1_000_000):
        newest = write(tmp_path, iteration)
    assert list(checkpoints_in(tmp_path)) == [999_999, 1_000_000]
    (newest / "state.pt").write_bytes(b"")
    assert sound_checkpoint(tmp_path / "last.ckpt", lambda text: None) is not None
    assert [iteration_in(name) for name in ("iteration_000010", "iteration_10", "x")] == [
        10,
        None,
        None,
    ]


def test_the_run_is_where_its_links_are(tmp_path: Path) -> None:
    """A link that was left for a moved checkpoint, and a user's own to one, both lead to the run;
    one out of the folder leads nowhere."""
    folder = tmp_path / "run/checkpoints"
    moved, second = write(folder, 1), write(folder, 2)
    moved.rename(tmp_path / "moved")
    moved.symlink_to(tmp_path / "moved")
    assert checkpoint_behind(moved) == moved
    point_link(folder / "last.ckpt", moved.name)
    assert checkpoint_behind(folder / "last.ckpt") == moved
    mine = tmp_path / "mine"
    mine.symlink_to("run/checkpoints/last.ckpt")
    assert checkpoint_behind(mine) == moved
    mine.unlink()
    mine.symlink_to("run/../run/checkpoints/iteration_000002")
    assert checkpoint_behind(mine) == second
    assert checkpoint_behind(folder / "../checkpoints/iteration_000002") == second
    for target in (str(tmp_path / "moved"), "../../moved"):
        point_link(folder / "last.ckpt", target)
        with pytest.raises(DamagedCheckpointError, match="out of its folder"):
            checkpoint_behind(folder / "last.ckpt")
        warnings: list[str] = []
        assert sound_checkpoint(folder / "last.ckpt", warnings.append) == second
        assert "out of its folder" in warnings[0]
    point_link(folder / "last.ckpt", "last.ckpt")
    with pytest.raises(DamagedCheckpointError, match="leads to itself"):
        checkpoint_behind(folder / "last.ckpt")


def _damage(checkpoint: Path, how: str) -> None:
    manifest = checkpoint / "manifest.json"
    contents = json.loads(manifest.read_text())
    if how == "empty":
        manifest.write_text("")
    elif how == "missing":
        manifest.unlink()
    elif how == "edited":
        manifest.write_text(json.dumps(contents | {"iteration": 1}))
    elif how == "nested":
        manifest.write_text("[" * 100_000)
    elif how == "bytes":
        manifest.write_bytes(b"\xff\xfe")
    elif how == "gone":
        shutil.rmtree(checkpoint)
    else:
        del contents["sha256"]
        contents |= {"format": 2} if how == "format" else {"files": {"../../x": [1, "a"]}}
        manifest.write_text(json.dumps(contents | {"sha256": manifests._digest(contents)}))


HOW = ("empty", "missing", "edited", "nested", "bytes", "gone", "format", "names")


@pytest.mark.parametrize("how", HOW)
def test_a_last_with_a_damaged_manifest_gives_way(tmp_path: Path, how: str) -> None:
    """As docs/resuming.md promises; the early check leaves it to the one that reads all files."""
    folder = tmp_path / "runs/1_run/checkpoints"
    older, newest = write(folder, 1), write(folder, 2)
    _damage(newest, how)
    config = parsed_config(f"output_dir={tmp_path / 'runs'}")
    for ckpt_path in ("last", str(folder / "last.ckpt")):
        for command in ("fit", "validate"):
            check_early(command, config, NOTHING | {"ckpt_path": ckpt_path})
        assert find_checkpoint(config.output_dir, ckpt_path, lambda text: None) == older
        resume = choose_resume(config, ckpt_path, lambda text: None)
        assert resume is not None
        assert (resume.checkpoint, resume.run_dir) == (older, folder.parent)
    with pytest.raises(UserError):
        find_checkpoint(config.output_dir, str(newest), lambda text: None)
    if how != "gone":
        with pytest.raises(DamagedCheckpointError):
            read_manifest(newest)


def test_two_runs_that_begin_at_once_have_two_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads the numbers of the others when it alone may."""
    both = threading.Barrier(2)
    newest_first = run_dirs.newest_first

    def slow(folder: Path) -> list[Path]:
        found = newest_first(folder)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # without a lock both have read before one has written
        return found

    monkeypatch.setattr(run_dirs, "newest_first", slow)
    config = parsed_config(f"output_dir={tmp_path}")
    opened: list[RunDir] = []
    threads = [
        threading.Thread(target=lambda: opened.append(open_run_dir(config, "x", resume=None)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number_of(run.path) for run in opened) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2, "no file is left beside the runs"


def test_earlier_configs_of_a_run_are_not_written_over(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for name in ("config.yaml", "config_2.yaml", "config_mine.yaml"):
        (tmp_path / name).write_text(name)
    for _ in range(2):
        run_dir.replace_config(parsed_config())
    assert (tmp_path / "config_1.yaml").read_text() == "config.yaml"
    assert (tmp_path / "config_2.yaml").read_text() == "config_2.yaml"
    assert (tmp_path / "config_3.yaml").is_file()


def test_old_rollouts_are_known_by_their_whole_name(tmp_path: Path) -> None:
    kept: ResumeCache = ResumeCache.__new__(ResumeCache)
    kept._run_dir = RunDir(tmp_path)
    folder = tmp_path / "rollouts"
    folder.mkdir()
    own, mine = kept.path(1, 0), folder / "iteration_000001_rank_0_mine.parquet"
    for path in (own, mine, folder / "iteration_x_rank_0.parquet", kept.path(2, 0)):
        path.write_text("")
    own.with_suffix(".sha256").write_text("")
    kept.forget(first_kept=2)
    assert sorted(path.name for path in folder.iterdir()) == [
        "iteration_000001_rank_0_mine.parquet",
        "iteration_000002_rank_0.parquet",
        "iteration_x_rank_0.parquet",
    ]


def test_links_are_not_followed_where_something_is_written_or_removed(tmp_path: Path) -> None:
    folder, link, text = tmp_path / "folder", tmp_path / "link", tmp_path / "text"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    link.symlink_to(folder)
    remove(link)
    assert (folder / "mine").read_text() == "mine"
    (tmp_path / ".text.new").symlink_to(folder / "mine")
    write_text(text, "new")
    assert ((folder / "mine").read_text(), text.read_text()) == ("mine", "new")
    assert [put_aside(path).name for path in (text, folder)] == ["text.other", "folder.other"]
    text.write_text("again")
    assert put_aside(text).name == "text.other2"


def test_a_folder_is_locked_by_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        folder_locked(tmp_path),
        pytest.raises(UserError, match=r"locked for 0\.05 s"),
        folder_locked(tmp_path, wait_s=0.05),
    ):
        pytest.fail("it is locked twice")
    assert list(tmp_path.iterdir()) == []
    with folder_locked(tmp_path):
        pass
    flock = fcntl.flock

    def refuse_folders(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(9, "Bad file descriptor")  # as NFS does
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse_folders)
    with (
        folder_locked(tmp_path),
        pytest.raises(UserError, match="locked for"),
        folder_locked(tmp_path, wait_s=0.05),
    ):
        pytest.fail("it is locked twice")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
