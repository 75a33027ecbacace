"""A sharded checkpoint that was made up to run code is refused before anything of it is run."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from vapo.errors import UserError
from vapo.runs.checkpoint_saving import _write_state
from vapo.runs.checkpoints import check_state, read_checkpoint
from vapo.runs.manifests import Manifest, describe_file
from vapo.runs.shard_index import check_shards, read_index

WEIGHTS = {"actor.w": torch.arange(6.0).reshape(2, 3), "actor.b": torch.ones(2).bfloat16()}
MOMENTS = {
    "state": {"actor.w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}},
    "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": ["actor.w"], "fused": None}],
}


class Evil:
    """As a pickle it is a call that makes the folder `ran`."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.ran),)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    state = {"config": "", "state_dict": WEIGHTS, "optimizer_states": [MOMENTS]}
    _write_state(state, folder, True, None)
    return folder


@pytest.fixture
def shards(written: Path, tmp_path: Path) -> Path:
    return sealed(shutil.copytree(written, tmp_path / "iteration_000001"))


def sealed(folder: Path) -> Path:
    """With a manifest of what is in it now: its checksums are no signature."""
    (folder / "manifest.json").unlink(missing_ok=True)
    files = {path.name: describe_file(path) for path in folder.iterdir()}
    Manifest(1, 1, "policy_optimization", "abc", {}, files).write(folder)
    return folder


def refused(folder: Path, reason: str, ran: Path) -> None:
    """By export and validate, which read weights, and by what a resumed run asks first."""
    for read in (read_checkpoint, check_shards):
        with pytest.raises(UserError, match=reason):
            read(sealed(folder))
    assert not ran.exists()


def test_what_vapo_writes_is_read(shards: Path) -> None:
    check_shards(shards)
    weights = read_checkpoint(shards)["state_dict"]
    assert weights.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert torch.equal(weights[name], tensor)
        assert weights[name].dtype == tensor.dtype


def test_an_index_that_runs_code(shards: Path, tmp_path: Path) -> None:
    index, ran = shards / ".metadata", tmp_path / "ran"
    whole = read_index(shards)
    whole.planner_data["x"] = Evil(ran)
    names: list[Any] = [
        Evil(ran),
        whole,
        {"builtins": eval},
        [torch.load, torch.hub.load],
        torch.nn.Linear,
    ]
    for number, value in enumerate(names):
        index.write_bytes(pickle.dumps(value, protocol=2 + number % 4))
        refused(shards, r"it (names (posix\.mkdir|builtins\.|torch)|has the operation GLOBAL)", ran)
    for text in (  # names in names, as protocol 4 has them, and extensions
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08os.mkdir\x93.",
        b"ctorch.serialization\nos.mkdir\n.",
        b"\x82\x01.",
        # a name that is put down long before, in the memo, or under what is taken away again
        b"\x80\x04\x8c\x05posix\x94\x8c\x05mkdir\x94N0\x93.",
        b"\x80\x04\x8c\x05posix\x94\x8c\x05mkdir\x94\x8c\x05torch\x8c\x04Size00\x93.",
        b"\x80\x04\x8c\x05posix\x94\x8c\x05mkdir\x94h\x00h\x01\x93.",
        b"\x80\x04\x8c\x05torch\x94(\x8c\x04Sizeh\x00\x93.",
        b"\x80\x04)\x94\x8c\x05torchh\x00\x93.",
        b"\x80\x04h\x07h\x07\x93.",
    ):
        index.write_bytes(text)
        refused(shards, "is not read", ran)


@pytest.mark.parametrize("name", ["state.pt", "meta.pt"])
def test_a_state_that_runs_code(tmp_path: Path, name: str) -> None:
    """It is refused in one line, before a run that resumes from it begins."""
    ran, folder = tmp_path / "ran", tmp_path / "iteration_000001"
    folder.mkdir()
    torch.save({"config": "", "state_dict": WEIGHTS}, folder / name)
    check_state(sealed(folder))
    torch.save({"config": "", "state_dict": {}, "x": Evil(ran)}, folder / name)
    for read in (read_checkpoint, check_state):
        with pytest.raises(UserError, match=r"could run code: it names posix\.mkdir") as refusal:
            read(sealed(folder))
        assert "\n" not in str(refusal.value)
    (folder / name).write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(UserError, match="is not a readable checkpoint: "):
        check_state(sealed(folder))
    assert not ran.exists()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x80\x04N.",
        b"]" * 1000,
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # a memo of two billion places
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"(" * 100_000,
    ],
)
def test_an_index_that_is_none(shards: Path, tmp_path: Path, text: bytes) -> None:
    (shards / ".metadata").write_bytes(text)
    refused(shards, r"\.metadata is not read", tmp_path / "ran")


def test_files_that_never_end(shards: Path, tmp_path: Path) -> None:
    (shards / ".metadata").unlink()
    sealed(shards)
    os.mkfifo(shards / ".metadata")
    for read in (read_checkpoint, check_shards):
        with pytest.raises(UserError, match="it is not a regular file"):
            read(shards)
    (shards / "meta.pt").unlink()
    (shards / ".metadata").unlink()
    sealed(shards)
    os.mkfifo(shards / "state.pt")
    with pytest.raises(UserError, match=r"lists no state\.pt"):
        read_checkpoint(shards)


def test_an_index_that_leads_out_of_its_folder(shards: Path, tmp_path: Path) -> None:
    shutil.copy(shards / "__0_0.distcp", tmp_path / "x.distcp")
    os.mkfifo(shards.parent / "fifo.distcp")
    names = ("../x.distcp", str(tmp_path / "x.distcp"), "../fifo.distcp", "manifest.json", "no")
    index = read_index(shards)
    for name in names:
        for stored in index.storage_data.values():
            stored.relative_path = name
        (shards / ".metadata").write_bytes(pickle.dumps(index))
        refused(shards, "but no such file of shards is in its folder", tmp_path / "ran")


def test_a_plain_value_that_runs_code(shards: Path, tmp_path: Path) -> None:
    """torch itself reads these without `weights_only` when the optimizers are restored."""
    index, ran = read_index(shards), tmp_path / "ran"
    buffer = io.BytesIO()
    torch.save(Evil(ran), buffer)
    with (shards / "__0_0.distcp").open("ab") as file:
        place = file.tell()
        file.write(buffer.getvalue())
    stored = index.storage_data[MetadataIndex("optimizer_0.param_groups.0.lr")]
    stored.offset, stored.length = place, len(buffer.getvalue())
    (shards / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"param_groups\.0\.lr: "):
        check_shards(sealed(shards))
    assert not ran.exists()
    read_checkpoint(shards)  # weights alone, which are tensors
    assert not ran.exists()
