"""Whatever is cut off or flipped in a checkpoint is found, and an older one is taken."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vapo.errors import UserError
from vapo.files.whole_files import point_link
from vapo.runs.checkpoint_saving import DiskUse, check_space, expected_bytes
from vapo.runs.checkpoints import read_checkpoint
from vapo.runs.manifests import (
    DamagedCheckpointError,
    Manifest,
    checkpoint_name,
    describe_file,
    read_manifest,
    sound_checkpoint,
    verify,
)
from vapo.training.supervised import require_room

NUM_PLACES = 25


def write(folder: Path, iteration: int, *, shards: bool = False) -> Path:
    """A checkpoint as the callback writes it, with made-up contents."""
    checkpoint = folder / checkpoint_name(iteration)
    checkpoint.mkdir(parents=True)
    draw = torch.Generator().manual_seed(iteration)
    weights = {"actor.model.w": torch.randn(40, 7, generator=draw)}
    contents = {"config": "seed: 0\n", "state_dict": weights, "iteration": iteration}
    if shards:
        (checkpoint / "meta.pt").write_bytes(b"shared" * 10)
        (checkpoint / ".metadata").write_bytes(b"index" * 10)
        for rank in range(2):
            (checkpoint / f"__{rank}_0.distcp").write_bytes(bytes(range(200)))
    else:
        torch.save(contents, checkpoint / "state.pt")
    files = {path.name: describe_file(path) for path in sorted(checkpoint.iterdir())}
    manifest = Manifest(
        iteration, 2, "policy_optimization", "abc", {"actor.w": "float32 [2]"}, files
    )
    manifest.write(checkpoint)
    point_link(folder / "last.ckpt", checkpoint.name)
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True], ids=["file", "shards"])
def test_every_damage_is_found_and_the_one_before_is_taken(tmp_path: Path, shards: bool) -> None:
    older = write(tmp_path, 4, shards=shards)
    newest = write(tmp_path, 5, shards=shards)
    assert verify(newest).iteration == 5
    count = 0
    for path in sorted(newest.iterdir()):
        original = path.read_bytes()
        stride = max(1, len(original) // NUM_PLACES)
        for place in range(0, len(original), stride):
            flipped = bytearray(original)
            flipped[place] ^= 1 << (place % 8)
            for damaged in (bytes(flipped), original[:place], original + b"x" * (place + 1)):
                path.write_bytes(damaged)
                warnings: list[str] = []
                assert sound_checkpoint(tmp_path / "last.ckpt", warnings.append) == older
                assert str(newest) in warnings[0]
                assert "taking iteration_000004" in warnings[0]
                count += 1
        path.unlink()
        assert sound_checkpoint(tmp_path / "last.ckpt", warnings.append) == older
        path.write_bytes(original)
    assert count > NUM_PLACES
    assert sound_checkpoint(tmp_path / "last.ckpt", pytest.fail) == newest


def test_the_checksum_is_of_the_whole_file(tmp_path: Path) -> None:
    """A million times `a`, of FIPS 180-2's examples."""
    (tmp_path / "file").write_bytes(b"a" * 1_000_000)
    digest = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
    assert describe_file(tmp_path / "file") == (1_000_000, digest)


def test_a_damaged_checkpoint_is_not_read(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 1)
    assert torch.equal(
        read_checkpoint(tmp_path / "last.ckpt")["state_dict"]["actor.model.w"],
        read_checkpoint(checkpoint)["state_dict"]["actor.model.w"],
    )
    (checkpoint / "state.pt").write_bytes(b"x" * (checkpoint / "state.pt").stat().st_size)
    with pytest.raises(DamagedCheckpointError, match=r"state\.pt is damaged"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_when_none_is_sound_nothing_is_taken(tmp_path: Path) -> None:
    for iteration in (1, 2):
        (write(tmp_path, iteration) / "state.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"is sound: .*iteration_000002.*iteration_000001"):
        sound_checkpoint(tmp_path / "last.ckpt", lambda text: None)
    assert sound_checkpoint(tmp_path / "empty/last.ckpt", pytest.fail) is None


def test_what_the_link_does_not_point_to_is_not_the_last(tmp_path: Path) -> None:
    """A folder beyond it is of a future that was gone back on; one aside is not finished."""
    _, second, third, _ = (write(tmp_path, iteration) for iteration in (1, 2, 3, 9))
    point_link(tmp_path / "last.ckpt", third.name)
    shutil.copytree(second, tmp_path / ".iteration_000002.new")
    assert sound_checkpoint(tmp_path / "last.ckpt", pytest.fail) == third
    (third / "state.pt").unlink()
    assert sound_checkpoint(tmp_path / "last.ckpt", lambda text: None) == second


def test_a_link_that_was_not_made_yet_is_not_needed(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 1)
    (tmp_path / "last.ckpt").unlink()
    assert sound_checkpoint(tmp_path / "last.ckpt", pytest.fail) == checkpoint


def test_another_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(tmp_path, 1)
    monkeypatch.setattr("vapo.runs.manifests.FORMAT", 2)
    with pytest.raises(UserError, match=r"written by vapo .* in format 1; .* reads format 2"):
        read_manifest(checkpoint)


def test_room_is_counted_before_it_is_needed(tmp_path: Path) -> None:
    module = torch.nn.Linear(10, 10)
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    assert expected_bytes(module) == 110 * 4 * 3 + 8
    check_space(tmp_path, DiskUse("it", 1000))
    with pytest.raises(OSError, match=r"needs 1048576\.0 GiB for it, and .* has .* left; set outp"):
        check_space(tmp_path, DiskUse("it", 2**50))


def test_a_supervised_training_whose_model_would_not_fit_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(free=2**20 + 110 * 4)
    monkeypatch.setattr("vapo.runs.checkpoint_saving.shutil.disk_usage", lambda folder: disk)
    require_room(tmp_path / "new", torch.nn.Linear(10, 10))
    disk.free -= 1
    with pytest.raises(UserError, match=r"training cannot begin: .* for the model, .* set export"):
        require_room(tmp_path / "new", torch.nn.Linear(10, 10))
