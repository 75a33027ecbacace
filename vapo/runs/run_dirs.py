"""A run's folder: where it is, what is in it, and how a later run finds it again.

<output_dir>/<UTC time>_<name>/
    config.yaml           the resolved config
    run.json              its state, its config's identity, its MLflow run, its number: runs are
                          in the order of their numbers, whatever clocks and time zones say
    checkpoints/          iteration_000004, iteration_000005; last.ckpt, best.ckpt point to them
    rollouts/             of the iteration in progress
    pretrained_critic/    Hugging Face folder, after value pretraining
    summary.json          at the end
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from vapo.config import FitConfig, resolve
from vapo.config.checkpoints import config_identity, identity_values
from vapo.config.layers import read_text
from vapo.config.nearest_path import nearest_path
from vapo.config.written import flatten_deciding, flatten_tree, to_yaml
from vapo.errors import UserError
from vapo.runs.manifests import FOLDERS, check, is_sharded, read_manifest, sound_checkpoint
from vapo.runs.summary import CONFIG_NAME, SUMMARY_NAME, make_run_dir
from vapo.system.files import try_lock, write_text
from vapo.system.process import is_main_process
from vapo.system.shown_text import say

RECORD_NAME = "run.json"
LAST, BEST = "last.ckpt", "best.ckpt"

Warn = Callable[[str], None]
State = Literal["begun", "running", "stopped", "finished"]
"""`begun`: the folder is there, and the run is not yet recorded."""


def tell(text: str) -> None:
    """One line about what is resumed."""
    if is_main_process():
        say(f"vapo: {text}", file=sys.stderr)


@dataclass
class RunDir:
    """A run's folder. Only the first process makes one, and holds its lock.

    On the others `path` is the folder that it lies in, unless the run is resumed: they learn
    it once the processes are connected. So any launcher will do.
    """

    path: Path
    identity: str = ""
    mlflow_run_id: str | None = None
    number: int = 0  # among the runs of its output_dir, in the order in which they began
    is_same_config: bool = True  # as the run's, where it is resumed
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def lock(self) -> None:
        """Raises: UserError when another process is at work in the folder."""
        if not is_main_process():
            return
        self._lock = (self.path / ".lock").open("a")
        if not try_lock(self._lock):
            self._lock.close()
            raise UserError(f"{self.path}: this run is still at work; wait for it or stop it")

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.close()

    def record(self, state: State, run_id: str | None) -> None:
        if is_main_process():
            contents = {
                "state": state,
                "identity": self.identity,
                "mlflow_run_id": run_id,
                "number": self.number,
            }
            write_text(self.path / RECORD_NAME, json.dumps(contents) + "\n")


@dataclass(frozen=True)
class Resume:
    """What is resumed: a run's folder, and its checkpoint if it has one already."""

    run_dir: Path
    checkpoint: Path | None


def choose_resume(config: FitConfig, ckpt_path: str | None, warn: Warn) -> Resume | None:
    """What `--ckpt_path` or `checkpoints.resume` say; None: a new run.

    Raises: UserError when what is asked for is not there or not sound.
    """
    if ckpt_path is not None:
        checkpoint = find_checkpoint(config.output_dir, ckpt_path, warn)
        return Resume(checkpoint.parent.parent, checkpoint)
    if config.checkpoints.resume == "never":
        return None
    output_dir = Path(config.output_dir).expanduser().absolute()
    found = unfinished_run(output_dir, identity_of(config))
    if found is None:
        warn(f"checkpoints.resume: no unfinished run of this config in {output_dir}: a new one")
        return None
    checkpoint_or_none = sound_checkpoint(found / "checkpoints" / LAST, warn)
    where = "its start" if checkpoint_or_none is None else checkpoint_or_none.name
    warn(f"checkpoints.resume: resuming {found} from {where}")
    return Resume(found, checkpoint_or_none)


def identity_of(config: FitConfig) -> str:
    return config_identity(flatten_deciding(config))


def unfinished_run(output_dir: Path, identity: str) -> Path | None:
    """The newest run of a config that has not finished and that nobody is at work on."""
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


def newest_first(output_dir: Path) -> list[Path]:
    """The folders of runs, the one that began last first."""
    folders = {path.parent for path in output_dir.glob(f"*/{RECORD_NAME}")}
    folders |= {path.parent for path in output_dir.glob("*/checkpoints")}
    return sorted(folders, key=order_of_runs, reverse=True)


def order_of_runs(run_dir: Path) -> tuple[int, str]:
    """By the number in its run.json, which no clock and no time zone changes.

    Runs from before there was one come first, by their names, which begin with the time.
    """
    return number_of(run_dir), run_dir.name


def number_of(run_dir: Path) -> int:
    """A run's number among those of its folder, from 1 up; 0 where it has none."""
    number = read_record(run_dir).get("number")
    return number if isinstance(number, int) else 0


def read_record(run_dir: Path) -> dict[str, Any]:
    """run.json, or nothing where it cannot be read."""
    try:
        contents = json.loads((run_dir / RECORD_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return contents if isinstance(contents, dict) else {}


def open_run_dir(config: FitConfig, name: str, *, resume: Resume | None) -> RunDir:
    """A new folder, or that of the resumed run; locked by the first process.

    Raises: UserError when it cannot be written, or another process is at work in it.
    """
    identity = identity_of(config)
    if resume is not None:
        path = resume.run_dir
        record = read_record(path)
        is_same = record.get("identity") == identity
        run_dir = RunDir(path, identity, record.get("mlflow_run_id"), number_of(path), is_same)
        try:
            run_dir.lock()
            if is_main_process():
                (path / SUMMARY_NAME).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot write in {path}: {error.strerror}") from None
        return run_dir
    if not is_main_process():
        return RunDir(Path(config.output_dir).expanduser().absolute(), identity)
    run_dir = RunDir(make_run_dir(config.output_dir, name), identity)
    run_dir.lock()
    run_dir.number = 1 + max(map(number_of, newest_first(run_dir.path.parent)), default=0)
    run_dir.record("begun", None)
    (run_dir.path / CONFIG_NAME).write_text(to_yaml(config))
    return run_dir


def changed_keys(run_dir: RunDir, config: FitConfig) -> list[str]:
    """Keys of the config whose values are not those that the run began with, with both."""

    def written(text: str) -> dict[str, Any]:
        return identity_values(flatten_tree(read_text(text, CONFIG_NAME).tree))

    try:
        began = written((run_dir.path / CONFIG_NAME).read_text())
    except (OSError, UserError):  # it is there to be read, and may be of another version
        return []
    now = written(to_yaml(config))
    keys = [key for key in now | began if now.get(key) != began.get(key)]
    if not keys:  # both say `${oc.env:NAME}`, and what is in the variable is kept nowhere
        return sorted({v.text for v in config.from_environment.values.values() if not v.is_secret})
    return [f"{key} {began.get(key, 'not set')} -> {now.get(key, 'not set')}" for key in keys]


def how_to_resume(run_dir: RunDir) -> str:
    """The command that resumes a stopped run."""
    last = run_dir.checkpoints / LAST
    if last.exists():
        return f"resume with --ckpt_path {shlex.quote(str(last))}, or with checkpoints.resume=auto"
    return "it has no checkpoint yet; checkpoints.resume=auto resumes it from its start"


def check_resumable(checkpoint: Path, config: FitConfig) -> None:
    """Check that a run of this config can resume from the checkpoint.

    A sharded checkpoint needs a sharded run, of any number of processes; one of a single file
    does not.

    Raises: UserError naming the fix; also where the run is beyond the config's end.
    """
    pretraining = resolve(config).value_pretraining_iterations
    most, done = pretraining + config.training.num_iterations, read_manifest(checkpoint).iteration
    if done > most:
        raise UserError(
            f"{checkpoint} is of iteration {done}, beyond the {most} of this config "
            f"({pretraining} of value pretraining, training.num_iterations "
            f"{config.training.num_iterations}): raise training.num_iterations"
        )
    if is_sharded(checkpoint) and config.trainer.strategy != "fsdp":
        raise UserError(
            f"{checkpoint} is a sharded checkpoint: set trainer.strategy=fsdp to resume from it "
            "(trainer.devices=1 will do)"
        )


def find_checkpoint(output_dir: str, ckpt_path: str, warn: Warn = tell) -> Path:
    """`last` and `best` mean the newest run in `output_dir` that has one; else a path.

    A `last` that is damaged gives way to the newest sound one before it.

    Raises: UserError when there is none.
    """
    path = look_for_checkpoint(output_dir, ckpt_path)
    checkpoint = sound_checkpoint(path, warn) if _may_give_way(path) else None
    if checkpoint is None:
        checkpoint = path.resolve()
        check(checkpoint)
    if ckpt_path in ("last", "best"):
        warn(f"--ckpt_path {ckpt_path}: {checkpoint}")
    return checkpoint


def look_for_checkpoint(output_dir: str, ckpt_path: str) -> Path:
    """The path that `find_checkpoint` means, of which only the manifest is read: takes no time.

    Raises: UserError when there is none, or it is not a whole checkpoint.
    """
    path = Path(ckpt_path).expanduser().absolute()
    if ckpt_path in ("last", "best"):
        folder, name = Path(output_dir).expanduser().absolute(), f"{ckpt_path}.ckpt"
        for run_dir in newest_first(folder):
            path = run_dir / "checkpoints" / name
            if path.is_symlink() or (name == LAST and any(path.parent.glob(FOLDERS))):
                break
        else:
            raise UserError(
                f"--ckpt_path {ckpt_path}: no run in {folder} has a {name}; start one without "
                "--ckpt_path, or set output_dir"
            )
    if _may_give_way(path) and any(path.parent.glob(FOLDERS)):
        return path
    if not path.exists():
        raise UserError(f"--ckpt_path: no checkpoint {path}{nearest_path(path)}")
    read_manifest(path.resolve())
    return path


def _may_give_way(path: Path) -> bool:
    """Whether an older checkpoint is taken where this one is damaged."""
    return path.name == LAST and not path.is_file()
