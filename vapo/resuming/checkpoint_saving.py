"""Writing a checkpoint so that nothing breaks it: aside, checked, then put in its place.

An error on any process is known to all of them before the next collective.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from vapo.distributed import leave_together, rank, world_size
from vapo.errors import InterruptedRunError
from vapo.resuming.checkpoints import STATE_NAME
from vapo.resuming.durable import replace_folder, sync
from vapo.resuming.manifests import Manifest, describe_file

_SPARE_BYTES = 1 << 20
_AFTER = (
    "; earlier checkpoints are whole, and so are the iteration's rollouts: mend it, then "
    "`--ckpt_path last` goes on"
)
SAVE_ERRORS = (OSError, RuntimeError, ValueError, CheckpointException)


class PlainFile(TorchCheckpointIO):
    """Writes straight to the path; Lightning's own goes through memory and $TMPDIR.

    An error is kept in `problem` and not raised: the other processes would wait for this one.
    """

    def __init__(self) -> None:
        self.problem: BaseException | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        try:
            with Path(path).open("wb") as file:
                torch.save(checkpoint, file)
        except SAVE_ERRORS as error:
            self.problem = error


def save_checkpoint(
    trainer: L.Trainer,
    final: Path,
    make_manifest: Callable[[dict[str, Any]], Manifest],
    *,
    expected: int,
) -> Manifest:
    """Write the whole state of the run to the folder `final`; every process must call it.

    Args:
        expected: bytes that must be free.

    Raises: InterruptedRunError on all processes; what was there before is as it was.
    """
    aside = final.with_name(f".{final.name}.new")
    what = f"cannot write the checkpoint {final}"

    def make_room() -> None:
        _make_empty(aside)
        check_space(aside, expected, "the checkpoint")

    together(make_room, what, after=_AFTER, first_only=True)
    shards = getattr(trainer.strategy, "_save_distributed_checkpoint", False)
    trainer.save_checkpoint(aside if shards else aside / STATE_NAME)
    files: dict[str, Any] = {}

    def check_written() -> None:
        keepers: list[Any] = [trainer.strategy, trainer.strategy.checkpoint_io]
        for keeper in keepers:
            if problem := getattr(keeper, "problem", None):
                keeper.problem = None
                raise problem
        for path in sorted(aside.iterdir()):
            if _is_mine(path.name):
                sync(path)
                files[path.name] = describe_file(path)

    together(check_written, what, after=_AFTER)
    described = _merged(files)

    manifest = make_manifest(described)

    def put_in_place() -> None:
        manifest.write(aside)
        replace_folder(aside, final)

    together(put_in_place, what, after=_AFTER, first_only=True)
    return manifest


def together(
    action: Callable[[], object], what: str, *, after: str = "", first_only: bool = False
) -> None:
    """Do it on every process, or on the first alone; if it fails on one, it does on all.

    Raises: InterruptedRunError: `what`, the reason, `after`.
    """
    problem = ""
    if rank() == 0 or not first_only:
        try:
            action()
        except SAVE_ERRORS as error:
            problem = _one_line(error)
    problems = [problem]
    if world_size() > 1:
        problems = [""] * world_size()
        dist.all_gather_object(problems, problem)
    found = next((text for text in problems if text), None)
    if found is not None:
        leave_together()
        # the first process says it
        raise InterruptedRunError(f"{what}: {found}{after}" if rank() == 0 else "")


def _one_line(error: BaseException) -> str:
    """The system's word, if there is one behind the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:300] or type(error).__name__


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _is_mine(name: str) -> bool:
    """Whether this process describes the file: its own shards; the first one all that is shared."""
    if name.endswith(".distcp"):
        return name.startswith(f"__{rank()}_")
    return rank() == 0


def _merged(files: dict[str, Any]) -> dict[str, Any]:
    if world_size() == 1:
        return files
    parts: list[dict[str, Any]] = [{}] * world_size()
    dist.all_gather_object(parts, files)
    return {name: entry for part in parts for name, entry in part.items()}


def expected_bytes(module: nn.Module) -> int:
    """The size of a checkpoint: weights, buffers, and Adam's two moments of what is trained."""
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    return weights + 2 * trained + buffers


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raises: OSError when the disk has not that much room."""
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE_BYTES:
        raise OSError(
            f"{what} needs {_gib(needed)} GiB, and {folder} has {_gib(free)} GiB left; lower "
            "checkpoints.keep, or set output_dir to a larger disk"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2g}"
