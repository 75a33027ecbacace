"""A run's checkpoints as folders: how they are named, and which one to take. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vapo.errors import UserError
from vapo.runs.manifests import DamagedCheckpointError, read_manifest, verify
from vapo.system.main_process import is_main_process

STATE_NAME = "state.pt"
SHARDS_NAME = "meta.pt"  # Lightning's
FOLDERS = "iteration_[0-9]*"


def checkpoint_name(iteration: int) -> str:
    return f"iteration_{iteration:06d}"


def iteration_of(name: str) -> int:
    """The inverse of `checkpoint_name`."""
    return int(name.removeprefix("iteration_"))


def is_sharded(checkpoint: Path) -> bool:
    return (checkpoint / SHARDS_NAME).is_file()


def path_for_lightning(checkpoint: Path) -> Path:
    """What a Trainer resumes from: the file, or the folder of shards."""
    return checkpoint if is_sharded(checkpoint) else checkpoint / STATE_NAME


def sound_checkpoint(link: Path, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint behind `last.ckpt`; if it is damaged, the newest sound one before it.

    None when there is none at all. Only the main process reads every file.

    Raises: UserError when there are checkpoints and none is sound.
    """
    target = link.resolve()
    older = sorted((p for p in link.parent.glob(FOLDERS) if p.name < target.name), reverse=True)
    candidates = [*([target] if target.exists() else []), *older]
    reasons = []
    for candidate in candidates:
        try:
            check(candidate)
        except DamagedCheckpointError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warn(f"{reason}; taking {candidate.name} instead")
        return candidate
    if reasons:
        raise UserError(f"no checkpoint in {link.parent} is sound: {'; '.join(reasons)}")
    return None


def check(checkpoint: Path) -> None:
    """Raises: DamagedCheckpointError. All files are read by the main process alone."""
    if is_main_process():
        verify(checkpoint)
    else:
        read_manifest(checkpoint)
