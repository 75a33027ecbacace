"""Reads and writes a checkpoint's manifest, which describes the model and has each file's checksum,
and chooses a sound checkpoint. This module does not import torch.

checkpoints/iteration_000005/
    manifest.json     written last: a folder without one is not a checkpoint
    state.pt          weights, optimizers, schedules, counters; or the shards of each process

A user may keep other things beside them: copies, archives, links to another disk. Only what
`checkpoints_in` lists is counted or removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vapo.errors import UserError
from vapo.files.whole_files import read_bounded, sha256, write_text
from vapo.system.installation import __version__
from vapo.system.process import is_main_process

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.pt"
SHARDS_NAME = "meta.pt"  # Lightning's
FORMAT = 1  # of folder and contents; another one is not read
_NAME = re.compile(r"iteration_([0-9]{6,})")
_MAX_MANIFEST_BYTES = 2**26
_MOST_LINKS = 40  # as the system follows them


class DamagedCheckpointError(UserError):
    """Raised for a damaged checkpoint, or one of another version; names file and fault."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's `manifest.json`.

    `parameters` maps names to `dtype [shape]`, and `files` maps names to sizes in bytes and
    SHA-256. `lora` and `critic_lora` are the options of adapters, which names and shapes do not
    show. `value_head` says what the critic's head computes; None means a scalar head.
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
    """Return a checkpoint's manifest. The checkpoint's other files are not read.

    Raises: DamagedCheckpointError: it is missing, damaged or of another version.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        inside = folder / "checkpoints" / "last.ckpt"
        hint = f"; it is a run's folder: give {inside}" if inside.exists() else ""
        raise DamagedCheckpointError(
            f"{folder} is not a whole checkpoint of this version: it has no {MANIFEST_NAME}{hint}"
        )
    try:
        contents = _contents(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if contents is None or contents.pop("sha256", None) != _digest(contents):
        raise DamagedCheckpointError(f"{path} is damaged: it does not match its own checksum")
    if contents.get("format") != FORMAT:
        raise DamagedCheckpointError(
            f"{folder} was written by vapo {contents.get('vapo_version')} in format "
            f"{contents.get('format')}; this is vapo {__version__}, which reads format {FORMAT}"
        )
    try:
        files = {
            name: (int(size), str(digest)) for name, (size, digest) in contents["files"].items()
        }
        manifest = Manifest(**{**contents, "files": files})
        is_ours = _is_well_formed(manifest)
    except (KeyError, TypeError, ValueError, AttributeError):
        is_ours = False
    if not is_ours:
        raise DamagedCheckpointError(f"{path} is not a manifest that vapo has written")
    return manifest


def _is_well_formed(manifest: Manifest) -> bool:
    """Whether the manifest's entries have their types, and all files lie in its folder."""
    options = (manifest.lora, manifest.critic_lora, manifest.value_head)
    return (
        isinstance(manifest.iteration, int)
        and isinstance(manifest.parameters, dict)
        and all(isinstance(option, dict | None) for option in options)
        and all(Path(name).name == name for name in manifest.files)
    )


def verify(folder: Path) -> Manifest:
    """Check every file of a checkpoint against its checksum, and return the manifest.

    Raises: DamagedCheckpointError: a file is missing or damaged; it names the file.
    """
    manifest = read_manifest(folder)
    if manifest.files.keys().isdisjoint((STATE_NAME, SHARDS_NAME)):
        raise DamagedCheckpointError(f"{folder / MANIFEST_NAME} lists no {STATE_NAME}")
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
    for (name, (_, digest)), actual_digest in zip(manifest.files.items(), digests, strict=True):
        if actual_digest != digest:
            raise DamagedCheckpointError(
                f"{folder / name} is damaged: it does not match its checksum"
            )
    return manifest


def _contents(manifest: Path) -> dict[str, Any] | None:
    """Return the contents of a manifest's file, or None if it is not a JSON object.

    Raises: OSError: the file cannot be read.
    """
    try:
        contents = json.loads(read_bounded(manifest, _MAX_MANIFEST_BYTES) or b"")
    except (ValueError, RecursionError):
        return None
    return contents if isinstance(contents, dict) else None


def _digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def checkpoint_name(iteration: int) -> str:
    return f"iteration_{iteration:06d}"


def iteration_in(name: str) -> int | None:
    """Return the iteration in a checkpoint's name, or None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None or checkpoint_name(int(match[1])) != name:
        return None
    return int(match[1])


def named_in(folder: Path) -> dict[int, Path]:
    """Return the paths in a folder that have a checkpoint's name, by iteration, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    numbered = {number: path for path in paths if (number := iteration_in(path.name)) is not None}
    return dict(sorted(numbered.items()))


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints that the run itself wrote, by iteration, oldest first."""
    return {number: path for number, path in named_in(folder).items() if is_own(path)}


def is_own(path: Path) -> bool:
    """Whether the run itself wrote this checkpoint, so that it may be removed.

    It must be a real folder with a manifest of the iteration that its name says. So a copy, which
    has the manifest of another iteration, and a link to another disk are the user's. A folder whose
    manifest was damaged is the run's if its state lies in it.
    """
    manifest = path / MANIFEST_NAME
    if path.is_symlink() or not path.is_dir() or manifest.is_symlink() or not manifest.is_file():
        return False
    try:
        contents = _contents(manifest)
    except OSError:  # it may not be read, so nobody knows whose it is
        return False
    if contents is None:
        return any((path / name).is_file() for name in (STATE_NAME, SHARDS_NAME))
    return "sha256" in contents and contents.get("iteration") == iteration_in(path.name)


def checkpoint_behind(path: Path) -> Path:
    """Return the checkpoint to which a path leads. `last.ckpt` is a link to one in the same folder.

    A user's own link to a checkpoint may lie anywhere. If a checkpoint was moved to another disk
    and replaced by a link, the link, in the run's folder, is returned.

    Raises: DamagedCheckpointError: a run's own link leads out of its folder, or links form a
        circle.
    """
    for _ in range(_MOST_LINKS):
        if ".." in path.parts:
            path = path.parent.resolve() / path.name
        if not path.is_symlink():
            return path
        target = Path(os.readlink(path))
        is_in_run = path.parent.name == "checkpoints"
        if is_in_run and iteration_in(path.name) is not None:
            return path
        if is_in_run and target.name != str(target):
            raise DamagedCheckpointError(
                f"{path} leads to {target}, out of its folder: give the path of the checkpoint "
                "itself"
            )
        path = path.parent / target
    raise DamagedCheckpointError(f"{path} is a link that leads to itself")


def is_sharded(checkpoint: Path) -> bool:
    return (checkpoint / SHARDS_NAME).is_file()


def path_for_lightning(checkpoint: Path) -> Path:
    """Return the path that a Trainer needs to resume: the state's file, or the folder of shards."""
    return checkpoint if is_sharded(checkpoint) else checkpoint / STATE_NAME


def sound_checkpoint(link: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the checkpoint behind `last.ckpt`; if it is damaged, the newest sound one before it.

    It is None if there is no checkpoint. `warn` gets a line for each damaged one. Only the main
    process reads every file.

    Raises: UserError: there are checkpoints and none is sound.
    """
    reasons = []
    try:
        target = checkpoint_behind(link)
    except DamagedCheckpointError as error:
        target = link
        reasons.append(str(error))
    newest = iteration_in(target.name)
    checkpoints = checkpoints_in(link.parent)
    older = [checkpoints[n] for n in reversed(checkpoints) if newest is None or n < newest]
    candidates = [*([target] if target.exists() and not reasons else []), *older]
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
    """Check a checkpoint's files in the main process, and its manifest alone in others.

    Raises: DamagedCheckpointError: a file or the manifest is damaged.
    """
    if is_main_process():
        verify(checkpoint)
    else:
        read_manifest(checkpoint)
