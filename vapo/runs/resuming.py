"""Finds what a run resumes: an earlier run and a checkpoint. Checks that the config fits them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vapo.config import FitConfig, resolve
from vapo.config.checkpoints import identity_values
from vapo.config.layers import read_text
from vapo.config.run_folders import is_run_folder
from vapo.config.written import flatten_tree, to_yaml
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.errors.suggestions import nearest_path
from vapo.runs.manifests import (
    DamagedCheckpointError,
    check,
    checkpoint_behind,
    checkpoints_in,
    is_sharded,
    read_manifest,
    sound_checkpoint,
)
from vapo.runs.run_dirs import LAST, Resume, RunDir, identity_of, newest_first, read_record
from vapo.runs.summary import CONFIG_NAME
from vapo.system.process import is_main_process

Warn = Callable[[str], None]


def tell(text: str) -> None:
    """Print a line on stderr, in the main process only."""
    if is_main_process():
        say(f"vapo: {text}", file=sys.stderr)


def choose_resume(config: FitConfig, ckpt_path: str | None, warn: Warn) -> Resume | None:
    """Return the run and checkpoint that `--ckpt_path` or `checkpoints.resume` choose, or None.

    Raises: UserError: the checkpoint is missing or damaged.
    """
    if ckpt_path is not None:
        checkpoint = find_checkpoint(config.output_dir, ckpt_path, warn)
        return Resume(checkpoint.parent.parent, checkpoint)
    if config.checkpoints.resume == "never":
        return None
    output_dir = Path(config.output_dir).expanduser().absolute()
    unfinished = unfinished_run(output_dir, identity_of(config))
    if unfinished is None:
        warn(f"checkpoints.resume: no unfinished run of this config in {output_dir}: a new one")
        return None
    checkpoint_or_none = sound_checkpoint(unfinished / "checkpoints" / LAST, warn)
    where = "its start" if checkpoint_or_none is None else checkpoint_or_none.name
    warn(f"checkpoints.resume: resuming {unfinished} from {where}")
    return Resume(unfinished, checkpoint_or_none)


def unfinished_run(output_dir: Path, identity: str) -> Path | None:
    """Return the newest run of a config that is unfinished and that no process works on, or None.

    `identity` is the config's (`identity_of`).
    """
    for path in newest_first(output_dir):
        contents = read_record(path)
        if (contents.get("state"), contents.get("identity")) != ("running", identity):
            continue
        run_dir = RunDir(path)
        with suppress(UserError):
            run_dir.lock()
            run_dir.close()
            return path
    return None


def changed_keys(run_dir: RunDir, config: FitConfig) -> list[str]:
    """Return a line for each config key that differs from the run's earlier config.

    It is empty if the earlier config cannot be read. If only environment variables that the config
    reads may have changed, the lines name these.
    """

    def written(text: str) -> dict[str, Any]:
        return identity_values(flatten_tree(read_text(text, CONFIG_NAME).tree))

    try:
        recorded_values = written((run_dir.path / CONFIG_NAME).read_text())
    except (OSError, UserError):  # it is there to be read, and may be of another version
        return []
    values = written(to_yaml(config))
    keys = [key for key in values | recorded_values if values.get(key) != recorded_values.get(key)]
    if not keys:  # both say `${oc.env:NAME}`, and what is in the variable is kept nowhere
        return sorted({v.text for v in config.from_environment.values.values() if not v.is_secret})
    return [
        f"{key} {recorded_values.get(key, 'not set')} -> {values.get(key, 'not set')}"
        for key in keys
    ]


def how_to_resume(run_dir: RunDir) -> str:
    """Return a line that says how to resume a stopped run."""
    last = run_dir.checkpoints / LAST
    if last.exists():
        return f"resume with --ckpt_path {shlex.quote(str(last))}, or with checkpoints.resume=auto"
    return "it has no checkpoint yet; checkpoints.resume=auto resumes it from its start"


def check_resumable(checkpoint: Path, config: FitConfig) -> None:
    """Check that a run of this config can resume from the checkpoint.

    A sharded checkpoint needs a sharded run, with any number of processes.

    Raises: UserError: it cannot, also because the checkpoint is beyond the config's last iteration.
        The message names the fix.
    """
    pretraining = resolve(config).value_pretraining_iterations
    last_iteration, iteration = (
        pretraining + config.training.num_iterations,
        read_manifest(checkpoint).iteration,
    )
    if iteration > last_iteration:
        changed = changed_keys(RunDir(checkpoint.parent.parent), config)
        if actor := [change for change in changed if change.startswith("actor.path ")]:
            raise UserError(f"{checkpoint} was saved by a run with another actor: {actor[0]}")
        raise UserError(
            f"{checkpoint} was saved after iteration {iteration}, beyond the {last_iteration} of "
            f"this config ({pretraining} of value pretraining, training.num_iterations "
            f"{config.training.num_iterations}): raise training.num_iterations"
        )
    if is_sharded(checkpoint) and config.trainer.strategy != "fsdp":
        raise UserError(
            f"{checkpoint} is a sharded checkpoint: set trainer.strategy=fsdp to resume from it "
            "(trainer.devices=1 will do)"
        )


def meant_by(ckpt_path: str, files: Sequence[Path]) -> str:
    """Return the path that `last` or `best` means if one of the config files is in a run's folder.

    It is that run's checkpoint. In any other case `ckpt_path` is returned unchanged.
    """
    run_folders = [f.parent for f in files if f.match("config*.yaml") and is_run_folder(f.parent)]
    if run_folders and ckpt_path in ("last", "best"):
        return str(run_folders[-1] / "checkpoints" / f"{ckpt_path}.ckpt")
    return ckpt_path


def find_checkpoint(output_dir: str, ckpt_path: str, warn: Warn = tell) -> Path:
    """Return the checkpoint that `--ckpt_path` means, after checking all its files.

    `last` and `best` mean the newest run in `output_dir` that has one; anything else is a path. If
    `last` is damaged, the newest sound checkpoint before it is returned.

    Raises: UserError: there is no such checkpoint.
    """
    path = look_for_checkpoint(output_dir, ckpt_path)
    checkpoint = sound_checkpoint(path, warn) if _may_give_way(path) else None
    if checkpoint is None:
        checkpoint = checkpoint_behind(path)
        check(checkpoint)
    if checkpoint != Path(ckpt_path).expanduser().absolute():
        warn(f"--ckpt_path {ckpt_path}: {checkpoint}")
    return checkpoint


def readable_checkpoint(output_dir: str, ckpt_path: str) -> Path | None:
    """Return the checkpoint that `--ckpt_path` means; only its manifest is checked.

    It is None if the checkpoint is damaged but `find_checkpoint` may find an older one.

    Raises: UserError: there is no such checkpoint, or it is not whole.
    """
    path = look_for_checkpoint(output_dir, ckpt_path)
    try:
        checkpoint = checkpoint_behind(path)
        read_manifest(checkpoint)
    except DamagedCheckpointError:
        if _may_give_way(path) and checkpoints_in(path.parent):
            return None
        raise
    return checkpoint


def look_for_checkpoint(output_dir: str, ckpt_path: str) -> Path:
    """Return the path that `--ckpt_path` means. It may be a link.

    Raises: UserError: there is no such path.
    """
    path = Path(ckpt_path).expanduser().absolute()
    if ckpt_path in ("last", "best"):
        folder, name = Path(output_dir).expanduser().absolute(), f"{ckpt_path}.ckpt"
        for run_dir in newest_first(folder):
            path = run_dir / "checkpoints" / name
            if os.path.lexists(path) or (name == LAST and checkpoints_in(path.parent)):
                break
        else:
            raise UserError(
                f"--ckpt_path {ckpt_path}: no run in {folder} has a {name}; start one without "
                "--ckpt_path, or set output_dir"
            )
    gives_way = _may_give_way(path) and checkpoints_in(path.parent)
    if not gives_way and not path.exists():
        raise UserError(f"--ckpt_path: no checkpoint {path}{nearest_path(path)}")
    return path


def _may_give_way(path: Path) -> bool:
    """Whether an older checkpoint may replace a damaged one here: only for `last.ckpt`."""
    return path.name == LAST and not path.is_file()
