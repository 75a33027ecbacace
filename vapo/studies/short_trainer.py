"""Short trainings for a study, which leave no files."""

from __future__ import annotations

from contextlib import closing

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger

from vapo.training.parts import TrainingParts


def train_briefly(parts: TrainingParts, watching: Callback, *, num_iterations: int) -> None:
    """Train in one process, without records, checkpoints and a progress display.

    Args:
        parts: the module, the data and the callbacks of the training.
        watching: a further callback, which measures.
    """
    trainer = L.Trainer(
        **parts.trainer_options
        | {"devices": 1, "num_nodes": 1, "strategy": "auto", "max_epochs": num_iterations},
        logger=DummyLogger(),
        callbacks=[*parts.callbacks, watching],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with closing(parts.datamodule):
        trainer.fit(parts.module, parts.datamodule)
