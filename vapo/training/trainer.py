"""Makes Lightning's Trainer, with a run's callbacks in the order in which they must come."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerBase

from vapo.rollouts.kept_rollouts import ResumeCache
from vapo.runs.run_dirs import RunDir
from vapo.runs.stopping import Peers, Stopping
from vapo.system.distributed import rank
from vapo.system.private_attributes import leave_signals_alone
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.callbacks.averaging import WeightAverage
from vapo.training.callbacks.checkpointing import Checkpointing
from vapo.training.callbacks.critic_knowledge import CriticKnowledge
from vapo.training.callbacks.diagnostics import DiagnosticTables, Evaluation, ValuePages
from vapo.training.callbacks.own_states import OwnStates
from vapo.training.callbacks.prompt_scores import PromptScores
from vapo.training.callbacks.recording import Recording, Watch
from vapo.training.callbacks.step_axis import StepAxis
from vapo.training.datamodule import StopAtSafePoints
from vapo.training.parts import TrainingParts


class RunCallbacks:
    """Makes all callbacks of a run. `in_order` lists them in the order in which they must come.

    The callbacks that the command reads after training are attributes, too.
    """

    def __init__(
        self,
        parts: TrainingParts,
        run_dir: RunDir,
        logger: RunLogger,
        progress: Progress,
        tokenizer: PreTrainedTokenizerBase,
        stopping: Stopping,
        rollout_cache: ResumeCache | None = None,
    ) -> None:
        config = parts.module.config
        self.peers = Peers()
        self.prompt_scores = PromptScores(run_dir, logger, progress)
        self.evaluation = Evaluation(logger, progress, self.prompt_scores)
        self.average = WeightAverage(run_dir, logger, progress, self.prompt_scores)
        self.value_pages = ValuePages(logger, tokenizer, progress, parts.truths)
        self.knowledge = CriticKnowledge()
        self.recording = Recording(logger, progress)
        self.watch = Watch(config.watch, parts.module.faults, run_dir, logger, progress)
        self.checkpointing = Checkpointing(
            run_dir,
            logger,
            every_n_iterations=config.checkpoints.every_n_iterations,
            keep=config.checkpoints.keep,
            score=self.evaluation.score_of,
            in_background=config.checkpoints.save_in_background,
            reason_not_to_save=lambda: self.watch.why_held,
            note=progress.note,
            rollout_cache=rollout_cache,
            add_seconds=progress.add_seconds,
        )
        self.in_order: list[Callback] = [
            StopAtSafePoints(stopping, self.peers),
            *parts.callbacks,
            self.prompt_scores,
            self.evaluation,
            *([self.average] if config.evaluation.average_policies is not None else []),
            self.value_pages,
            self.knowledge,
            self.recording,
            self.watch,
            DiagnosticTables(logger, parts.truths),
            StepAxis(logger),
            self.checkpointing,
        ]
        if config.trainer.profile:
            self.in_order.append(Profiling(run_dir.path, progress))

    def add(self, user_callbacks: Sequence[Callback]) -> None:
        """Insert the user's own callbacks before the checkpointing, so that a checkpoint includes
        what they did in its iteration."""
        place = self.in_order.index(self.checkpointing)
        self.in_order[place:place] = (
            [*user_callbacks, OwnStates(user_callbacks)] if user_callbacks else []
        )


def make_trainer(
    parts: TrainingParts, callbacks: Sequence[Callback], logger: RunLogger
) -> L.Trainer:
    """Make Lightning's Trainer for a run. It handles no signals, because the run itself does."""
    trainer = L.Trainer(
        **parts.trainer_options,
        logger=logger,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    leave_signals_alone(trainer)
    return trainer


@dataclass(eq=False)
class Profiling(Callback):
    """Traces the run's second iteration, or the only one. It must be the last callback.

    The first of several iterations is not traced because it includes work that is done once: memory
    is allocated, kernels are chosen. The trace is written into the run's folder.
    """

    run_dir: Path
    progress: Progress
    _finished: int = field(default=0, init=False)
    _profiler: profile | None = field(default=None, init=False)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.max_epochs == 1:
            self._start()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finished += 1
        if self._profiler is not None:
            self._write(self._profiler)
        elif self._finished == 1 and not trainer.should_stop:
            self._start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._profiler is not None:  # the run ended inside the iteration
            self._write(self._profiler)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.progress.annotate = torch.profiler.record_function
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def _write(self, profiler: profile) -> None:
        self._profiler = None
        path = self.run_dir / f"trace_rank{rank()}.json.gz"
        self.progress.annotate = nullcontext
        with self.progress.stage("trace"):
            profiler.stop()
            profiler.export_chrome_trace(str(path))
        self.progress.note(f"trace of an iteration: {path} (opens in ui.perfetto.dev)")
