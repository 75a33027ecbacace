"""When a checkpoint is written, which are kept, and what `last.ckpt` and `best.ckpt` point to."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from vapo.datamodule import datamodule_of
from vapo.distributed import rank
from vapo.errors import UserError
from vapo.module import VapoModule
from vapo.resuming.checkpoint_saving import check_space, expected_bytes, save_checkpoint, together
from vapo.resuming.checkpoints import FOLDERS, checkpoint_name
from vapo.resuming.compatibility import parameters_of
from vapo.resuming.durable import point_link
from vapo.resuming.manifests import Manifest
from vapo.resuming.run_dirs import BEST, LAST, RunDir
from vapo.tracking.logger import RunLogger


class Checkpointing(Checkpoint):
    """Saves at the end of an iteration: every n-th, the last, and each with a better score.

    As a `Checkpoint` it runs after the module has counted the iteration. What the iteration
    logged is on the disk first, so that a resumed run never lacks it; then the rollouts that were
    kept for it are removed.

    Args:
        held: while it is true, nothing is written.
    """

    def __init__(
        self,
        run_dir: RunDir,
        logger: RunLogger,
        *,
        every_n_iterations: int,
        keep: int,
        held: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run_dir = run_dir
        self.logger = logger
        self.every_n_iterations = every_n_iterations
        self.keep = keep
        self.held = held
        self.best_score = -math.inf
        self.best_name: str | None = None
        self._num_bytes = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_name": self.best_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_name = state_dict["best_score"], state_dict["best_name"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Tell the other processes where the run's folder is."""
        self.run_dir.path = Path(trainer.strategy.broadcast(str(self.run_dir.path)))
        resumes = trainer.ckpt_path is not None
        if trainer.strategy.broadcast(resumes) is not resumes:
            raise UserError(
                f"process {rank()} does not see the checkpoint that the first goes on with: "
                "output_dir must be on a disk that all hosts share"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Whether all that will be kept finds room, before anything is sampled."""
        self._num_bytes = expected_bytes(pl_module)
        together(self._prepare, "the run cannot begin", first_only=True)

    def _prepare(self) -> None:
        folder = self.run_dir.checkpoints
        folder.mkdir(exist_ok=True)
        for left_over in folder.glob(".iteration_*"):
            shutil.rmtree(left_over, ignore_errors=True)
        (folder / ".written").touch()  # whether it can be
        (folder / ".written").unlink()
        num_more = self.keep + 2 - len(list(folder.glob(FOLDERS)))  # the best, and one aside
        check_space(folder, max(num_more, 1) * self._num_bytes, f"keeping {self.keep} and the best")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        iteration = int(pl_module.iteration)
        score = float(trainer.callback_metrics["eval/avg_at_k"])
        is_best = score > self.best_score
        is_last = trainer.should_stop or iteration >= (trainer.max_epochs or 0)
        if self.held() or not (is_best or is_last or iteration % self.every_n_iterations == 0):
            return
        name = checkpoint_name(iteration)
        if is_best:
            self.best_score, self.best_name = score, name
        self.logger.sync()
        manifest = save_checkpoint(
            trainer,
            self.run_dir.checkpoints / name,
            lambda files: self._manifest(pl_module, files),
            expected=self._num_bytes,
        )
        self._num_bytes = manifest.num_bytes
        together(
            lambda: self._tidy(name), "the checkpoints cannot be put in order", first_only=True
        )
        kept = datamodule_of(trainer).kept
        if kept is not None and rank() == 0:
            kept.forget(before=iteration)

    def _manifest(self, module: VapoModule, files: dict[str, Any]) -> Manifest:
        return Manifest(
            iteration=int(module.iteration),
            policy_steps=int(module.policy_steps),
            phase=module.phase.value,
            identity=self.run_dir.identity,
            parameters=parameters_of(module),
            files=files,
        )

    def _tidy(self, name: str) -> None:
        """Point the links, then remove what is too old, or of a future that was gone back on."""
        folder = self.run_dir.checkpoints
        point_link(folder / LAST, name)
        if self.best_name is not None and (folder / self.best_name).is_dir():
            point_link(folder / BEST, self.best_name)
        past = sorted(path.name for path in folder.glob(FOLDERS) if path.name <= name)
        kept = {*past[-self.keep :], self.best_name}
        for path in folder.glob(FOLDERS):
            if path.name not in kept:
                shutil.rmtree(path)
