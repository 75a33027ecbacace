"""`trainer.profile`: a trace of one whole iteration, sampling included."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile

from vapo.system.distributed import rank
from vapo.system.progress import Progress


class Profiling(Callback):
    """Traces the second iteration of the run, or the only one; must come last.

    The first one includes one-time work: memory is allocated, kernels are chosen.
    """

    def __init__(self, run_dir: Path, progress: Progress) -> None:
        self.run_dir = run_dir
        self.progress = progress
        self._finished = 0
        self._profiler: profile | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.max_epochs == 1:
            self._start()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finished += 1
        if self._profiler is not None:
            self._write()
        elif self._finished == 1 and not trainer.should_stop:
            self._start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._profiler is not None:  # the run ended inside the iteration
            self._write()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.progress.annotate = torch.profiler.record_function
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def _write(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        path = self.run_dir / f"trace_rank{rank()}.json.gz"
        self.progress.annotate = nullcontext
        with self.progress.stage("trace"):
            profiler.stop()
            profiler.export_chrome_trace(str(path))
        self.progress.note(f"trace of an iteration: {path} (opens in ui.perfetto.dev)")
