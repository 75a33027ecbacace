"""Decides when a checkpoint is written, which are kept, and where `last.ckpt` and `best.ckpt`
point."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from vapo.errors import InterruptedRunError, UserError
from vapo.errors.shown_text import shown_size
from vapo.files.whole_files import point_link, put_aside, remove
from vapo.rollouts.kept_rollouts import ResumeCache, max_cache_bytes
from vapo.runs.checkpoint_saving import (
    BackgroundSaves,
    DiskUse,
    bytes_in,
    check_space,
    error_reason,
    expected_bytes,
    host_has_room,
    num_kept,
    run_on_all_ranks,
    write_checkpoint,
)
from vapo.runs.checkpoints import adapter_options, parameters_of, value_head_options
from vapo.runs.manifests import (
    DamagedCheckpointError,
    Manifest,
    checkpoint_behind,
    checkpoint_name,
    checkpoints_in,
    iteration_in,
    named_in,
    read_manifest,
)
from vapo.runs.resuming import tell
from vapo.runs.run_dirs import BEST, LAST, RunDir
from vapo.system.distributed import gather_objects, rank
from vapo.system.private_attributes import checkpoint_state
from vapo.tracking.logger import RunLogger
from vapo.training.module import VapoModule


@dataclass(eq=False)
class Checkpointing(Checkpoint):
    """Saves a checkpoint at the end of every n-th iteration, of the last, and of each iteration
    whose policy has a better score than those saved before.

    A policy that was never updated is not saved for its score: it is the model in `actor.path`.

    As a `Checkpoint` it runs after the module has counted the iteration. The iteration's metrics
    are written to the disk first, so that a resumed run never lacks them. Once the checkpoint is in
    its folder, the rollouts that were kept on the disk until then are removed.

    Args:
        score: returns the held-out score of the current policy, or -inf if it is not measured.
        in_background: whether to write while the next iteration runs. An error of the write is then
            raised at that iteration's end. If None, it is True on a GPU whose host has room for the
            copy.
        reason_not_to_save: returns why only the run's last checkpoint may be saved now, or an empty
            text if any may.
        note: shows a line on the console.
        rollout_cache: the rollouts that the run keeps on the disk; None: it keeps none.
        add_seconds: is called with the name "checkpoint" and the seconds that training waited.
    """

    run_dir: RunDir
    logger: RunLogger
    every_n_iterations: int
    keep: int | None
    score: Callable[[VapoModule], float]
    in_background: bool | None = False
    reason_not_to_save: Callable[[], str] = lambda: ""
    note: Callable[[str], None] = tell
    rollout_cache: ResumeCache | None = None
    add_seconds: Callable[[str, float], None] = lambda name, seconds: None
    best_score: float = field(default=-math.inf, init=False)
    best_name: str | None = field(default=None, init=False)
    _saves: BackgroundSaves | None = field(default=None, init=False)
    _num_bytes: int = field(default=0, init=False)
    _num_kept: int = field(default=2, init=False)
    _not_removed: set[Path] = field(default_factory=set, init=False)

    @property
    def best(self) -> tuple[float, int] | tuple[None, None]:
        """The score of `best.ckpt`, and the iteration after which it was saved. Both are None if
        there is no best checkpoint."""
        iteration = iteration_in(self.best_name or "")
        return (None, None) if iteration is None else (self.best_score, iteration)

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_name": self.best_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_name = state_dict["best_score"], state_dict["best_name"]
        if self.best_name is not None and iteration_in(self.best_name) is None:
            raise UserError(
                f"the checkpoint's best_name {self.best_name!r:.80} is not the name of a "
                "checkpoint: resume from another checkpoint"
            )

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Send the path of the run's folder from the first process to the others.

        Raises: UserError: a process does not see the checkpoint that the first resumes from.
        """
        self.run_dir.path = Path(trainer.strategy.broadcast(str(self.run_dir.path)))
        resumes = trainer.ckpt_path is not None
        if trainer.strategy.broadcast(resumes) is not resumes:
            raise UserError(
                f"process {rank()} does not see the checkpoint that the first resumes from: "
                "output_dir must be on a disk that all hosts share"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check before any sampling that the disk has room for the checkpoints; note their size."""
        assert isinstance(pl_module, VapoModule)
        self._num_bytes = expected_bytes(pl_module)
        if pl_module.ridge is not None and pl_module.critic is not None:
            self._num_bytes += pl_module.ridge.num_bytes(pl_module.critic)
        about_waiting = self._choose_background(on_gpu=pl_module.device.type == "cuda")
        if self.in_background:
            self._saves = BackgroundSaves()
        self._num_kept = num_kept(self.keep, self._num_bytes)
        prepare = partial(self._prepare, pl_module)
        run_on_all_ranks(prepare, "the run cannot begin", first_only=True)
        self.note(
            f"checkpoints: about {shown_size(self._num_bytes)} each; {self._num_kept} and the best "
            "are kept (checkpoints.keep), up to "
            f"{shown_size((self._num_kept + 2) * self._num_bytes)} while "
            f"one is written{about_waiting}"
        )

    def _choose_background(self, *, on_gpu: bool) -> str:
        """Decide whether to save in the background if the config leaves it open, on all ranks
        alike.

        Returns: the end of the note about checkpoints, which says what was decided.
        """
        refused = False
        if self.in_background is None:
            has_room = gather_objects(host_has_room(self._num_bytes))[0]
            self.in_background, refused = on_gpu and has_room, on_gpu and not has_room
        if self.in_background:
            return "; training waits only for a copy of each in host memory"
        if refused:
            return (
                "; training waits for each: a copy would take more than half of the host's free "
                "memory (checkpoints.save_in_background)"
            )
        return ""

    def _kept_besides(self, module: VapoModule) -> list[DiskUse]:
        """Return the disk space that the run may still need for files other than checkpoints."""
        config, run = module.config, self.run_dir.path
        total = module.hyperparameters.value_pretraining_iterations + config.training.num_iterations
        every = min(self.every_n_iterations, total)
        uses = []
        if self.rollout_cache is not None:
            # those sampled ahead, and those of an iteration that runs during a save
            num = every + config.training.max_staleness + bool(self.in_background)
            num *= module.hyperparameters.num_responses
            longest = config.rollouts.max_response_tokens
            more = max(max_cache_bytes(num, longest) - bytes_in(run / "rollouts"), 0)
            fix = "checkpoints.every_n_iterations=1, or " if every > 1 else ""
            fix += "checkpoints.keep_rollouts=false"
            uses.append(DiskUse(f"{num} rollouts of {longest} tokens", more, fix))
        if module.has_critic and module.hyperparameters.value_pretraining_iterations > 0:
            weights = (p for name, p in module.named_parameters() if name.startswith("critic."))
            size = sum(p.numel() * p.element_size() for p in weights)
            more = max(size - bytes_in(run / "pretrained_critic"), 0)
            uses.append(DiskUse("the critic after value pretraining", more))
        return uses

    def _prepare(self, module: VapoModule) -> None:
        """Make the folder of checkpoints, remove unfinished ones of a killed run, and check that
        the folder can be written to and that the disk has room."""
        folder = self.run_dir.checkpoints
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                self._remove(path)
        (folder / ".written").touch()  # whether it is possible
        (folder / ".written").unlink()
        num_at_most = self._num_kept + 2  # the best, and a temporary one
        num_more = max(num_at_most - len(checkpoints_in(folder)), 1)
        content = f"{num_more} checkpoints (newest {self._num_kept}, best, the one being written)"
        fix = "checkpoints.keep=1" if self._num_kept > 1 else ""
        checkpoints = DiskUse(content, num_more * self._num_bytes, fix)
        check_space(folder, checkpoints, *self._kept_besides(module))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        started = time.monotonic()
        iteration = int(pl_module.iteration)
        score, reason = self.score(pl_module), self.reason_not_to_save()
        is_best = score > self.best_score
        is_last = trainer.should_stop or iteration >= (trainer.max_epochs or 0)
        is_due = is_best and int(pl_module.policy_steps) > 0
        is_due = is_due or iteration % self.every_n_iterations == 0
        is_due = is_last or (is_due and not reason)
        self._settle(wait=is_due)
        if not is_due:
            return
        if reason:
            self.note(f"iteration {iteration} is the run's last: it is saved although {reason}")
        if is_best:
            self.best_score, self.best_name = score, checkpoint_name(iteration)
        self.logger.sync()
        self._save(trainer, pl_module)
        if is_last:
            self._settle(wait=True)
        self.add_seconds("checkpoint", time.monotonic() - started)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Wait for a save that is in progress, and report it on the console if it failed."""
        error = None if self._saves is None else self._saves.drain()
        if isinstance(error, InterruptedRunError):
            tell(str(error))
        elif error is not None:
            tell(f"the checkpoint that was being saved is not finished: {error_reason(error)}")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for the last save, and remove kept rollouts that the last checkpoint makes unneeded.

        A run that was killed right after its last checkpoint has left such rollouts.
        """
        self._settle(wait=True)
        last = self.run_dir.checkpoints / LAST
        if self.rollout_cache is not None and last.exists() and rank() == 0:
            with suppress(DamagedCheckpointError):  # the next run finds it, and needs its rollouts
                self.rollout_cache.forget(
                    first_kept=read_manifest(checkpoint_behind(last)).iteration
                )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._settle(wait=True)
        if self._saves is not None:
            self._saves.drain()

    def _save(self, trainer: L.Trainer, module: VapoModule) -> None:
        """Write the checkpoint, or copy the run's state and start a thread that writes the copy."""
        manifest, expected, best_name = self._manifest(module), self._num_bytes, self.best_name
        sharded = module.config.trainer.sharded_checkpoints
        saves = self._saves
        group = None if saves is None else saves.group
        final = self.run_dir.checkpoints / checkpoint_name(manifest.iteration)
        trouble = "the checkpoints cannot be put in order"

        def put_in_order() -> None:
            self._tidy(manifest.iteration, best_name)

        def write(state: dict[str, Any]) -> Manifest:
            written_manifest = write_checkpoint(
                state, final, manifest, sharded=sharded, expected=expected, group=group
            )
            run_on_all_ranks(put_in_order, trouble, first_only=True, group=group)
            return written_manifest

        state = checkpoint_state(trainer)
        if rank() > 0 and not sharded:
            state = {}  # the first process writes it all: no other copies its own
        if saves is not None:
            saves.start(state, write)
        else:
            self._num_bytes = write(state).num_bytes

    def _settle(self, *, wait: bool) -> None:
        """Raise the error of an earlier background save. With `wait`, wait for its end first."""
        manifest = None if self._saves is None else self._saves.finish_pending(wait=wait)
        if manifest is not None:
            self._num_bytes = manifest.num_bytes

    def _manifest(self, module: VapoModule) -> Manifest:
        return Manifest(
            iteration=int(module.iteration),
            policy_steps=int(module.policy_steps),
            phase=module.phase.value,
            identity=self.run_dir.identity,
            parameters=parameters_of(module),
            files={},
            lora=adapter_options(module.config, "actor"),
            critic_lora=adapter_options(module.config, "critic"),
            value_head=value_head_options(module.config),
        )

    def _tidy(self, iteration: int, best_name: str | None) -> None:
        """Update `last.ckpt` and `best.ckpt`; remove unneeded checkpoints and rollouts.

        Checkpoints are removed if they are too old, or later than `iteration`. A run that was
        resumed from an earlier checkpoint has left the later ones.
        """
        folder = self.run_dir.checkpoints
        self._point(folder / LAST, checkpoint_name(iteration))
        if best_name is not None and (folder / best_name).is_dir():
            self._point(folder / BEST, best_name)
        checkpoints = checkpoints_in(folder)
        past = [path.name for number, path in checkpoints.items() if number <= iteration]
        names_to_keep = {*past[-self._num_kept :], best_name}
        for number, path in named_in(folder).items():
            if path.name not in names_to_keep and (path.is_symlink() or number in checkpoints):
                self._remove(path)
        if self.rollout_cache is not None:
            try:
                self.rollout_cache.forget(first_kept=iteration)
            except OSError as error:
                self.note(f"rollouts/: cannot remove old ones: {error_reason(error)}")

    def _point(self, link: Path, name: str) -> None:
        """Make the link point to the checkpoint of this name. Move any other file there aside.

        A tool that copies folders may have put a copy of the checkpoint there.
        """
        if os.path.lexists(link) and not link.is_symlink():
            self.note(f"{link} was not a link: it was moved to {put_aside(link).name} beside it")
        point_link(link, name)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, or the unfinished folder of a killed run.

        A checkpoint is renamed first, so that a half removed one is never taken for a checkpoint. A
        failure is shown once and does not end the run.
        """
        try:
            if path.is_symlink():
                self.note(f"{path} is removed, and what it leads to stays: {path.readlink()}")
            elif not path.name.startswith("."):
                path = path.rename(path.with_name(f".{path.name}.old"))
            remove(path)
        except OSError as error:
            if path not in self._not_removed:
                self._not_removed.add(path)
                self.note(f"checkpoints: cannot remove {path}: {error_reason(error)}")


_LEFT_OVER = re.compile(r"\.iteration_[0-9]{6,}\.(new|old)")
