"""The Trainer of the benchmarks: one CPU process that keeps, shows and validates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


def one_process_trainer(
    callbacks: Sequence[Callback], *, precision: Any, num_iterations: int, folder: str
) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_epochs=num_iterations,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
