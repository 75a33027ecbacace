"""Watches each iteration's metrics, warns, and ends the run where the config asks for it."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from vapo.config.watch import WatchConfig
from vapo.diagnostics.watchers import WatcherState
from vapo.errors import StoppedRun
from vapo.runs.run_dirs import RunDir
from vapo.system.distributed import max_over_ranks, rank
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks.recording import mean_of_steps
from vapo.training.datamodule import iteration_of
from vapo.training.faults import Faults
from vapo.training.module import VapoModule
from vapo.types import Phase


class Watch(Callback):
    """Logs `faults/...` and `watch/...`; raises StoppedRun at the end of an iteration.

    Must come after `Recording` and before the checkpoints, so that a run which stops has its
    metrics, and keeps the checkpoint of before.
    """

    def __init__(
        self,
        config: WatchConfig,
        faults: Faults,
        run_dir: RunDir,
        logger: RunLogger,
        progress: Progress,
    ) -> None:
        self.faults = faults
        faults.note = progress.note
        self.run_dir = run_dir
        self.logger = logger
        self.progress = progress
        self.watchers = [WatcherState(name, w) for name, w in config.watchers().items()]
        self.warnings: dict[str, str] = {}  # the newest of each watcher

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.faults.rollouts.open(self.run_dir.path, rank())

    def state_dict(self) -> dict[str, Any]:
        return {state.name: state.state_dict() for state in self.watchers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for state in self.watchers:
            if state.name in state_dict:
                state.load_state_dict(state_dict[state.name])

    @property
    def holds_checkpoint(self) -> bool:
        """Whether `last.ckpt` must not be overwritten, because the run may be about to end."""
        return bool(self.faults.streaks) or any(w.holds_checkpoint for w in self.watchers)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        iteration = iteration_of(trainer)
        metrics = {**iteration.metrics, **mean_of_steps(pl_module.minibatch_metrics)}
        logged = self.faults.pop_metrics()
        stops: list[WatcherState] = []
        for state, is_alarm in self.look(iteration.number, iteration.phase, metrics):
            logged[f"watch/{state.name}"] = float(is_alarm)
            stops += [state] if is_alarm and state.watcher.action == "stop" else []
        self.logger.log_metrics(logged, step=trainer.global_step)
        if stops:
            raise StoppedRun("; ".join(f"{s.describe()}; {s.advise()}" for s in stops))

    def look(
        self, iteration: int, phase: Phase, metrics: dict[str, float]
    ) -> list[tuple[WatcherState, bool]]:
        """Which watchers have a figure in this iteration, and whether each is in alarm."""
        looks = []
        for state in self.watchers:
            if state.name == "explained_variance" and phase is Phase.VALUE_PRETRAINING:
                continue  # raising it is the purpose of this phase
            is_alarm = state.look(iteration, metrics | agreed(metrics, state))
            if is_alarm:
                self.warn(state)
            if is_alarm is not None:
                looks.append((state, is_alarm))
        return looks

    def warn(self, state: WatcherState) -> None:
        """Warn once an episode, on the console and as a tag; the summary has the latest figure."""
        assert state.episode is not None
        self.warnings[state.name] = state.describe()
        if not state.episode.alarmed:
            state.episode.alarmed = True
            self.progress.note(f"watch: {state.describe()}; {state.advise()}")
            self.logger.set_tags({f"watch/{state.name}": state.describe()})


def agreed(metrics: dict[str, float], state: WatcherState) -> dict[str, float]:
    """Make the watchers' figures bit-identical on all ranks, so that all ranks stop or none."""
    values = [metrics.get(key, math.nan) for key in state.sign.metrics]
    known = [v if math.isfinite(v) else -math.inf for v in values]
    known_everywhere = max_over_ranks(torch.tensor(known, dtype=torch.double))
    return dict(zip(state.sign.metrics, known_everywhere.tolist(), strict=True))
