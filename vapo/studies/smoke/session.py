"""Measure one session of a smoke test: the first iterations of a run, which then ends."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import lightning as L
import psutil
import torch
from lightning.pytorch.callbacks import Callback

from vapo.config import FitConfig
from vapo.files.whole_files import write_text
from vapo.runs.checkpoint_saving import bytes_in, num_kept
from vapo.runs.run_dirs import LAST
from vapo.studies.smoke.forecast import OTHER, RunPart, Session
from vapo.system.progress import Progress
from vapo.training.callbacks.checkpointing import Checkpointing
from vapo.training.datamodule import datamodule_of, iteration_of
from vapo.training.module import VapoModule

_LOOK_S = 0.05  # seconds between two looks at the memory
_FIND_CHILDREN_S = 1.0  # seconds between two searches for child processes
_ENGINE_STARTS = "engine_start"


class SmokeSession(Callback):
    """Callback that ends a run in good order after iteration `last`, and writes a `Session`.

    The run then saves a checkpoint, as it does after its last iteration. The session is written
    into `file`. This callback must come after the evaluation, whose time does not belong to the
    run's start.
    """

    def __init__(self, last: int, file: Path) -> None:
        self.last = last
        self.file = file
        self.memory = MemoryWatch()
        self.parts: list[RunPart] = []
        self._part_start = psutil.Process().create_time()
        self._seconds_before: dict[str, float] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.memory.begin_part(RunPart("start"), datamodule_of(trainer).progress)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.memory.device = pl_module.device

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        self._end_part(datamodule_of(trainer).progress)
        self.memory.begin_part(RunPart(pl_module.phase.value), datamodule_of(trainer).progress)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or iteration_of(trainer).number >= self.last

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, VapoModule)
        self._end_part(datamodule_of(trainer).progress)
        self.memory.close()
        if trainer.is_global_zero:
            session = self._session(trainer, pl_module.config)
            write_text(self.file, json.dumps(asdict(session)))

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self.memory.close()

    def _end_part(self, progress: Progress) -> None:
        """Record the seconds of each stage in the part of the session that ends now.

        A part is the session's start or one iteration. A stage that did not run in it has no entry,
        and the time outside all stages is that of `OTHER`. The next part's time begins now.
        """
        now, part = time.time(), self.memory.part
        seconds = {
            stage: total - self._seconds_before.get(stage, 0.0)
            for stage, total in progress.stage_seconds.items()
            if total > self._seconds_before.get(stage, 0.0)
        }
        other = max(0.0, now - self._part_start - sum(seconds.values()))
        part.seconds.update(seconds, **{OTHER: other})
        self.parts.append(part)
        self._part_start, self._seconds_before = now, dict(progress.stage_seconds)

    def _session(self, trainer: L.Trainer, config: FitConfig) -> Session:
        (saving,) = (c for c in trainer.checkpoint_callbacks if isinstance(c, Checkpointing))
        run_dir = saving.run_dir
        checkpoint_bytes = bytes_in((run_dir.checkpoints / LAST).resolve())
        heldout = datamodule_of(trainer).source.collection.prompts.heldout
        return Session(
            self.parts,
            checkpoint_bytes=checkpoint_bytes,
            num_kept=num_kept(config.checkpoints.keep, checkpoint_bytes),
            critic_bytes=bytes_in(run_dir.path / "pretrained_critic"),
            num_evaluated=len(heldout[: config.evaluation.num_prompts]) * config.evaluation.k,
            gpu_bytes=self.memory.gpu_bytes,
        )


class MemoryWatch:
    """Notes the peaks of memory in use, in a thread that looks twenty times a second.

    A peak belongs to the running stage of the `part` that began last. The host's memory is the
    resident memory of this process and of its child processes. The GPU's memory is all that is in
    use on it, by whatever process. The GPU is looked at once `device` is set, but not while an
    engine starts, which may record CUDA graphs: nothing may disturb it then.
    """

    def __init__(self) -> None:
        self.part = RunPart("start")
        self.device: torch.device | None = None
        self._progress: Progress | None = None
        self._is_closed = threading.Event()
        self._process = psutil.Process()
        self._children: list[psutil.Process] = []
        self._children_found = -_FIND_CHILDREN_S
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def begin_part(self, part: RunPart, progress: Progress) -> None:
        self.part, self._progress = part, progress

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    @property
    def gpu_bytes(self) -> int | None:
        """The memory of the GPU; None without one."""
        return torch.cuda.mem_get_info(self.device)[1] if self._on_gpu else None

    @property
    def _on_gpu(self) -> bool:
        return self.device is not None and self.device.type == "cuda"

    def _watch(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Raise the running stage's peaks to the memory that is in use now, if that is more.

        Between stages the peaks are those of `OTHER`.
        """
        stage = "" if self._progress is None else self._progress.running_stage
        peaks = [(self.part.host, self._host_bytes())]
        if self._on_gpu and stage != _ENGINE_STARTS:
            free, total = torch.cuda.mem_get_info(self.device)
            peaks.append((self.part.gpu, total - free))
        for peak, num_bytes in peaks:
            stage = stage or OTHER
            peak[stage] = max(peak.get(stage, 0), num_bytes)

    def _host_bytes(self) -> int:
        now = time.monotonic()
        if now - self._children_found >= _FIND_CHILDREN_S:
            self._children, self._children_found = self._process.children(recursive=True), now
        num_bytes = self._process.memory_info().rss
        for child in self._children:
            with suppress(psutil.Error):  # it has ended
                num_bytes += child.memory_info().rss
        return num_bytes
