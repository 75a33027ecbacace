"""Checks what the user's own callbacks put into a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from vapo.errors import UserError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype)


@dataclass(eq=False)
class OwnStates(Callback):
    """Checks, before each checkpoint, the states that the user's own callbacks put into it.

    A checkpoint is read without running code that it names, so its values must be of plain types.

    Args:
        user_callbacks: the user's callbacks.
    """

    user_callbacks: Sequence[Callback]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in self.user_callbacks:
            if (name := not_plain(callback.state_dict())) is not None:
                raise UserError(
                    f"the callback {type(callback).__name__} has a {name} in its state_dict(), "
                    "with which the run's checkpoints could not be read again: let it return "
                    "numbers, text, tensors, and lists, tuples and dicts of them"
                )


def not_plain(value: Any) -> str | None:
    """Return the name of the first type in the value that a checkpoint cannot hold, or None."""
    if isinstance(value, dict):
        return not_plain([*value, *value.values()])
    if type(value) in (list, tuple, set):
        return next((name for item in value if (name := not_plain(item)) is not None), None)
    return None if isinstance(value, _PLAIN) else type(value).__name__
