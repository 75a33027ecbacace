"""A checkpoint's folder, which one to take, and its manifest: what it is of, and each file's
checksum. Imports no torch.

checkpoints/iteration_000005/
    manifest.json     written last: a folder without one is not a checkpoint
    state.pt          weights, optimizers, schedules, counters; or the shards of each process
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vapo.errors import UserError
from vapo.system.files import sha256, write_text
from vapo.system.installation import __version__
from vapo.system.process import is_main_process

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.pt"
SHARDS_NAME = "meta.pt"  # Lightning's
FOLDERS = "iteration_[0-9]*"
FORMAT = 1  # of folder and contents; another one is not read


class DamagedCheckpointError(UserError):
    """Not what was written: says which file, and how it differs."""


@dataclass(frozen=True)
class Manifest:
    """`parameters`: name -> `dtype [shape]`; `files`: name -> size in bytes and SHA-256.

    `lora` and `critic_lora`: the options of the actor's and the critic's adapters, which names
    and shapes do not tell; `value_head`: what the critic's head computes, None if it is scalar.
    """

    iteration: int
    policy_steps: int
    phase: str
    identity: str
    parameters: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]
    lora: Mapping[str, Any] | None = None
    value_head: Mapping[str, Any] | None = None
    critic_lora: Mapping[str, Any] | None = None
    vapo_version: str = __version__
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        contents = json.loads(json.dumps(asdict(self)))
        text = json.dumps({**contents, "sha256": _digest(contents)}, indent=1)
        write_text(folder / MANIFEST_NAME, text + "\n")

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def describe_file(path: Path) -> tuple[int, str]:
    return path.stat().st_size, sha256(path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone; the files are not looked at.

    Raises: DamagedCheckpointError; UserError for one of another version.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        inside = folder / "checkpoints" / "last.ckpt"
        hint = f"; it is a run's folder: give {inside}" if inside.exists() else ""
        raise DamagedCheckpointError(
            f"{folder} is not a whole checkpoint of this version: it has no {MANIFEST_NAME}{hint}"
        )
    try:
        contents = json.loads(path.read_bytes())
        digest = contents.pop("sha256")
        is_ours = digest == _digest(contents)
    except (ValueError, KeyError, AttributeError, TypeError):
        is_ours = False
    if not is_ours:
        raise DamagedCheckpointError(f"{path} is damaged: it does not match its own checksum")
    if contents["format"] != FORMAT:
        raise UserError(
            f"{folder} was written by vapo {contents['vapo_version']} in format "
            f"{contents['format']}; this is vapo {__version__}, which reads format {FORMAT}"
        )
    contents["files"] = {name: tuple(entry) for name, entry in contents["files"].items()}
    return Manifest(**contents)


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose every file is what was written.

    Raises: DamagedCheckpointError naming the file.
    """
    manifest = read_manifest(folder)
    for name, (size, _) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing")
        if path.stat().st_size != size:
            raise DamagedCheckpointError(
                f"{path} is damaged: {path.stat().st_size} bytes of {size}"
            )
    with ThreadPoolExecutor(4) as threads:  # hashing lets other threads run
        digests = list(threads.map(lambda name: sha256(folder / name), manifest.files))
    for (name, (_, digest)), found in zip(manifest.files.items(), digests, strict=True):
        if found != digest:
            raise DamagedCheckpointError(
                f"{folder / name} is damaged: it does not match its checksum"
            )
    return manifest


def _digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def checkpoint_name(iteration: int) -> str:
    return f"iteration_{iteration:06d}"


def iteration_in(name: str) -> int:
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
