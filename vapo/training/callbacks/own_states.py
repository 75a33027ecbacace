"""The states of a user's own callbacks must be such that a checkpoint can be read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from vapo.errors import UserError

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.Tensor,
    torch.dtype,
)


class OwnStates(Callback):
    """Checks them before each checkpoint: it is read without running code that it names."""

    def __init__(self, own: Sequence[Callback]) -> None:
        self.own = own

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in self.own:
            if (found := not_plain(callback.state_dict())) is not None:
                raise UserError(
                    f"the callback {type(callback).__name__} has a {found} in its state_dict(), "
                    "with which the run's checkpoints could not be read again: let it return "
                    "numbers, text, tensors, and lists, tuples and dicts of them"
                )


def not_plain(value: Any) -> str | None:
    """The type of a part of the value that a checkpoint may not have; None if there is none."""
    if isinstance(value, dict):
        return not_plain([*value, *value.values()])
    if type(value) in (list, tuple, set):
        return next((found for item in value if (found := not_plain(item)) is not None), None)
    return None if isinstance(value, _PLAIN) else type(value).__name__
