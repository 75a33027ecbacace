"""Keeps the critic's explained variance at the end of each phase, for the run's summary."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from vapo.training.datamodule import iteration_of
from vapo.types import Phase

_NUM_BATCHES = 4  # the figure of a single batch is a noisy draw


@dataclass(eq=False)
class CriticKnowledge(Callback):
    """Keeps the critic's explained variance of the last four batches of each phase, in `latest`.

    `heldout` is the best explained variance on held-out rollouts, or None. It is measured where
    value pretraining trains on stored rollouts and holds some of them out; the critic of the best
    pass is the one that goes on. Must come after `ValuePretraining`, which measures it.
    """

    latest: dict[str, list[float]] = field(default_factory=dict, init=False)
    heldout: float | None = field(default=None, init=False)

    def state_dict(self) -> dict[str, Any]:
        return {"latest": self.latest, "heldout": self.heldout}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.latest, self.heldout = state_dict["latest"], state_dict["heldout"]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        iteration = iteration_of(trainer)
        explained = iteration.metrics.get("critic/explained_variance", math.nan)
        if math.isfinite(explained):  # it is nan where all returns of the batch are equal
            batches = self.latest.setdefault(iteration.phase.value, [])
            batches.append(explained)
            del batches[:-_NUM_BATCHES]
        heldout = iteration.metrics.get("critic/heldout_explained_variance", math.nan)
        if math.isfinite(heldout):
            self.heldout = heldout if self.heldout is None else max(self.heldout, heldout)

    def after(self, phase: Phase) -> float | None:
        """Return the critic's mean explained variance in the phase's last batches, or None.

        After value pretraining it is the one on held-out rollouts, if that was measured.
        """
        if phase is Phase.VALUE_PRETRAINING and self.heldout is not None:
            return self.heldout
        batches = self.latest.get(phase.value)
        return fmean(batches) if batches else None
