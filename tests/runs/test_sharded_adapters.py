"""Adapters of two sharded processes: killed, resumed and exported."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.runs import runs
from tests.runs.comparing import assert_same, assert_same_run
from tests.runs.test_two_processes import FSDP, SHARDS, pair, restored, tail
from vapo.commands import export
from vapo.runs.checkpoints import read_checkpoint

pytestmark = [pytest.mark.kills, pytest.mark.timeout(3600)]

RANK, ALPHA = 2, 8
ADAPTERS = [
    *(f"actor.lora.rank={RANK}", f"actor.lora.lora_alpha={ALPHA}"),
    *(f"critic.lora.rank={RANK}", f"critic.lora.lora_alpha={ALPHA}"),
    "critic.init=policy",
    "algorithm.kl.coef=0.01",  # the reference is the actor with its adapters off
]


def last(folder: Path) -> Path:
    return runs.only_run(folder) / "checkpoints/last.ckpt"


def shards(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of shards, the optimizers' too."""
    reader = FileSystemReader(path)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def merged_by_hand(state: dict[str, Any], network: str) -> dict[str, torch.Tensor]:
    """W + alpha / rank * B A, under the names of a plain folder."""
    prefix, found = f"{network}.model.", {}
    own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    for name, weight in own.items():
        if ".lora_" in name:
            continue
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            a, b = (own[f"{stem}.lora_{part}.default.weight"] for part in "AB")
            weight = weight + ALPHA / RANK * (b @ a)
        found[name.replace(".base_layer", "")] = weight
    return found


@pytest.mark.parametrize("is_sharded", [False, True], ids=["file", "shards"])
def test_killed_resumed_and_exported(tmp_path: Path, store: Path, is_sharded: bool) -> None:
    """Bit for bit the run that nothing stopped; one process begins where two do."""
    arguments = [*ADAPTERS, *([SHARDS] if is_sharded else [])]
    whole, again = tmp_path / "whole", tmp_path / "again"
    for folder in (whole, again):
        folder.mkdir()
    assert pair(whole, store, *arguments) == [0, 0], tail(whole)
    hook = ("kill_at", "minibatch", "8")  # in the policy phase
    assert pair(again, store, *arguments, hook=hook) == [-signal.SIGKILL] * 2, tail(again)
    by_two = restored(again, store, tmp_path / "two.pt", *ADAPTERS, two=True)
    by_one = restored(again, store, tmp_path / "one.pt", *ADAPTERS, FSDP)
    assert int(by_two["state_dict"]["iteration"]) == 3
    assert_same(by_one, by_two)
    assert pair(again, store, *arguments, "checkpoints.resume=auto") == [0, 0], tail(again)
    assert_same_run(again, whole)
    if is_sharded:
        found, expected = (shards(last(folder)) for folder in (again, whole))
        assert any("exp_avg" in name and ".lora_" in name for name in expected), list(expected)
        assert_same(found, expected)
    state = read_checkpoint(last(again))["state_dict"]
    for network in ("actor", "critic"):
        moved = [t for n, t in state.items() if n.startswith(network) and ".lora_B." in n]
        assert moved
        assert all(tensor.any() for tensor in moved), "B starts at zero"
        export.run(last(again), tmp_path / network, network)
        saved = load_file(tmp_path / network / "model.safetensors")
        by_hand = merged_by_hand(state, network)
        assert saved.keys() <= by_hand.keys()  # of a tied weight one name is written
        for name, tensor in saved.items():
            torch.testing.assert_close(tensor, by_hand[name], atol=1e-6, rtol=0)
