"""Reading a run's checkpoint outside of a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vapo.errors import UserError


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's contents; tensors and plain values only, never pickled objects.

    Raises: UserError when the file is missing, damaged or not one of ours.
    """
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} is not a readable checkpoint: {error}") from error
    if not isinstance(contents, dict) or not {"config", "state_dict"} <= contents.keys():
        raise UserError(f"{path} is not a checkpoint of `vapo fit`: it has no config and weights")
    return contents


def network_state(contents: dict[str, Any], network: str) -> dict[str, Tensor]:
    """The weights of `actor` or `critic`, under the names of its Hugging Face model."""
    prefix = f"{network}.model."
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in contents["state_dict"].items()
        if name.startswith(prefix)
    }
    if not state:
        raise UserError(f"the checkpoint has no {network}; a critic-free run has only an actor")
    return state
