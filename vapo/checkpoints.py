"""Reading a run's checkpoint outside of a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from vapo.config import FitConfig
from vapo.config.loading import from_yaml
from vapo.errors import UserError
from vapo.lora import merged


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's contents: a file, or the folder of a sharded run (without optimizers).

    Files hold tensors and plain values only, never pickled objects. The index of a folder is
    a pickle that torch reads itself: open only folders of your own runs.

    Raises: UserError when the file is missing, damaged or not one of ours.
    """
    if not path.exists():
        raise UserError(f"no checkpoint {path}")
    try:
        contents = _read_shards(path) if path.is_dir() else _read_file(path)
    except Exception as error:
        raise UserError(f"{path} is not a readable checkpoint: {error}") from error
    if not isinstance(contents, dict) or not {"config", "state_dict"} <= contents.keys():
        raise UserError(f"{path} is not a checkpoint of `vapo fit`: it has no config and weights")
    return contents


def _read_file(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_shards(folder: Path) -> Any:
    """The weights of all shards put together, and what every shard shares."""
    contents = _read_file(folder / "meta.pt")
    reader, prefix = FileSystemReader(folder), "state_dict."
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    load(weights, storage_reader=reader, no_dist=True)
    contents["state_dict"] = {name.removeprefix(prefix): t for name, t in weights.items()}
    return contents


def network_state(contents: dict[str, Any], network: str) -> dict[str, Tensor]:
    """The weights of `actor` or `critic`, under the names of its Hugging Face model.

    The actor's adapters are merged.
    """
    prefix = f"{network}.model."
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in contents["state_dict"].items()
        if name.startswith(prefix)
    }
    if not state:
        raise UserError(f"the checkpoint has no {network}; a critic-free run has only an actor")
    if network == "critic":
        return state
    config = from_yaml(FitConfig, contents["config"], source="the checkpoint's config")
    return dict(merged(state.items(), config.actor.lora))
