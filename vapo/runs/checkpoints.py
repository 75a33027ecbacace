"""Reading a checkpoint's contents without a Trainer; `manifests` says which to take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from vapo.config import FitConfig
from vapo.config.loading import from_yaml
from vapo.errors import UserError
from vapo.networks.lora import merged
from vapo.runs.manifests import SHARDS_NAME, STATE_NAME, is_sharded, verify


def read_checkpoint(path: Path, *, verified: bool = False) -> dict[str, Any]:
    """A checkpoint's contents; one of a sharded run without optimizers.

    Files hold tensors and plain values only, never pickled objects. The index of shards is
    a pickle that torch reads itself: open only checkpoints of your own runs.

    Raises: UserError when the checkpoint is missing, damaged or not one of ours.
    """
    if not path.exists():
        raise UserError(f"no checkpoint {path}")
    if not verified:
        verify(path)
    try:
        contents = _read_shards(path) if is_sharded(path) else _read_file(path / STATE_NAME)
    except Exception as error:
        raise UserError(f"{path} is not a readable checkpoint: {error}") from error
    if not isinstance(contents, dict) or not {"config", "state_dict"} <= contents.keys():
        raise UserError(f"{path} is not a checkpoint of `vapo fit`: it has no config and weights")
    return contents


def _read_file(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_shards(folder: Path) -> Any:
    """The weights of all shards put together, and what every shard shares."""
    contents = _read_file(folder / SHARDS_NAME)
    reader, prefix = FileSystemReader(folder), "state_dict."
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    load(weights, storage_reader=reader, no_dist=True)
    contents["state_dict"] = {name.removeprefix(prefix): t for name, t in weights.items()}
    return contents


def network_state(contents: dict[str, Any], network: str, *, member: int = 0) -> dict[str, Tensor]:
    """The weights of `actor` or `critic`, under the names of its Hugging Face model.

    Adapters are merged. Of several critics those of one member.
    """
    config = from_yaml(FitConfig, contents["config"], source="the checkpoint's config")
    is_one = network == "actor" or config.critic.count == 1
    prefix = f"{network}.model." if is_one else f"{network}.members.{member}.model."
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in contents["state_dict"].items()
        if name.startswith(prefix)
    }
    if not state:
        raise UserError(f"the checkpoint has no {network}; a critic-free run has only an actor")
    return dict(merged(state.items(), getattr(config, network).lora))


@dataclass(frozen=True)
class Checkpoint:
    """One that has been read, and where it lies."""

    path: Path
    contents: dict[str, Any]

    def fill(self, model: nn.Module, network: str, start: str, *, member: int = 0) -> None:
        """Load the weights of `actor` or `critic` into the model that was read from `start`.

        Of several critics those of one member.

        Raises: UserError: the checkpoint does not have it, or it is of another architecture.
        """
        try:
            model.load_state_dict(network_state(self.contents, network, member=member))
        except UserError as error:
            raise UserError(f"{self.path}: {error}; score it with its run's own config") from None
        except RuntimeError as error:
            reason = " ".join(str(error).split()[:40])
            raise UserError(f"{self.path}: its {network} does not fit {start}: {reason}") from None
