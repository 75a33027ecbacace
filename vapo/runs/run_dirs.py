"""A run's folder: where it is and what is in it; `vapo.runs.resuming` finds it again.

<output_dir>/<UTC time>_<name>/
    config.yaml           the resolved config
    run.json              its state, its config's identity, its MLflow run, its number: runs are
                          in the order of their numbers, whatever clocks and time zones say
    checkpoints/          iteration_000004, iteration_000005; last.ckpt, best.ckpt point to them
    rollouts/             of the iteration in progress
    prompt_scores.jsonl   which prompts each batch's and each evaluation's policy solved
    averaged_policy/      Hugging Face folder, with evaluation.export_average
    logs/vllm.log         what vLLM wrote, where it samples in the run's process
    pretrained_critic/    Hugging Face folder, after value pretraining
    summary.json          at the end
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal

from vapo.config import FitConfig
from vapo.config.checkpoints import config_identity
from vapo.config.run_folders import RECORD_NAME, is_run_folder
from vapo.config.written import flatten_deciding, to_yaml
from vapo.errors import UserError
from vapo.files.made_folders import missing_folders, taken_back_if_refused
from vapo.files.whole_files import (
    folder_locked,
    read_bounded,
    try_lock,
    why_not_writable,
    write_text,
)
from vapo.runs.summary import CONFIG_NAME, SUMMARY_NAME
from vapo.system.process import is_main_process
from vapo.tracking.records import is_run_id

LAST, BEST = "last.ckpt", "best.ckpt"
_MAX_RECORD_BYTES = 2**20
FIRST_FILES = (CONFIG_NAME, RECORD_NAME, ".lock")
"""What a new run's folder has before anything is sampled."""

State = Literal["begun", "running", "stopped", "finished"]
"""`begun`: the folder is there, and the run is not yet recorded."""


@dataclass
class RunDir:
    """A run's folder and its run.json. Only the first process makes the folder and locks it.

    On the other processes `path` is the parent folder, unless the run is resumed: they get the path
    once the processes are connected. So any launcher works.
    """

    path: Path
    identity: str = ""
    mlflow_run_id: str | None = None
    number: int = 0  # among the runs of its output_dir, in the order in which they began
    is_same_config: bool = True  # as the run's, where it is resumed
    new_folders: list[Path] = field(default_factory=list)  # by this process, innermost first
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def lock(self) -> None:
        """Lock the folder against other processes; only the first process does so.

        Raises: UserError: another process is at work in the folder.
        """
        if not is_main_process():
            return
        self._lock = (self.path / ".lock").open("a")
        if not try_lock(self._lock):
            self._lock.close()
            raise UserError(f"{self.path}: this run is still at work; wait for it or stop it")

    def close(self) -> None:
        """Release the lock."""
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

    def replace_config(self, config: FitConfig) -> None:
        """Write the config that the run continues with; earlier ones stay as config_1.yaml, ..."""
        if is_main_process():
            latest = self.path / CONFIG_NAME
            earlier = (self.path / f"config_{number}.yaml" for number in count(1))
            free = next(path for path in earlier if not os.path.lexists(path))
            if latest.exists():  # nothing that a run needs, and somebody may have removed it
                write_text(free, latest.read_text(encoding="utf-8"))
            write_text(latest, to_yaml(config))


@dataclass(frozen=True)
class Resume:
    """The run's folder that is resumed, and its checkpoint, or None if it has none yet."""

    run_dir: Path
    checkpoint: Path | None


def identity_of(config: FitConfig) -> str:
    return config_identity(flatten_deciding(config))


def newest_first(output_dir: Path) -> list[Path]:
    """Return the folders of all runs in `output_dir`, the newest first."""
    folders = {path.parent for path in output_dir.glob(f"*/{RECORD_NAME}")}
    folders |= {path.parent for path in output_dir.glob("*/checkpoints")}
    return sorted(folders, key=order_of_runs, reverse=True)


def order_of_runs(run_dir: Path) -> tuple[int, str]:
    """Return the key that sorts runs by age: the number in run.json, then the folder's name.

    The number does not depend on a clock or time zone. Runs without one have 0, so they come first,
    sorted by their names, which begin with the time.
    """
    return number_of(run_dir), run_dir.name


def number_of(run_dir: Path) -> int:
    """Return a run's number among the runs of its output_dir, from 1 up, or 0 if it has none."""
    number = read_record(run_dir).get("number")
    return number if isinstance(number, int) else 0


def read_record(run_dir: Path) -> dict[str, Any]:
    """Return the contents of a run's run.json; they are empty if it cannot be read."""
    path = run_dir / RECORD_NAME
    try:
        text = read_bounded(path, _MAX_RECORD_BYTES) if path.is_file() else None
        contents = json.loads(text or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}


def make_run_dir(output_dir: str | Path, run_name: str) -> Path:
    """Make a new folder `<output_dir>/<UTC time>_<run_name>` and return its path.

    Raises: UserError: the folder cannot be made (it names output_dir), or its name would be too
        long (it names tracking.run_name).
    """
    safe_name = re.sub(r"[^\w.-]+|-{2,}", "-", run_name)
    stem, num_bytes = f"{datetime.now(UTC):%Y%m%d-%H%M%S}_{safe_name}", len(safe_name.encode())
    base = Path(output_dir).expanduser().absolute()
    try:
        base.mkdir(parents=True, exist_ok=True)
        around = len(stem.encode()) - num_bytes + len("-1000")  # runs that begin in one second
        if num_bytes > (allowed := os.pathconf(base, "PC_NAME_MAX") - around):
            raise UserError(
                f"tracking.run_name: '{safe_name[:40]}...' has {num_bytes} bytes in UTF-8; the "
                f"run's folder is named after it, which leaves it {allowed}: choose a shorter name"
            )
        run_dir = base / stem
        for attempt in count(2):
            try:
                run_dir.mkdir()
                break
            except FileExistsError:
                run_dir = base / f"{stem}-{attempt}"
    except OSError as error:
        raise _cannot_make(base, error.strerror) from error
    return run_dir


def check_output_dir(output_dir: str | Path) -> None:
    """Check that a run's folder can be made in `output_dir`. Nothing is made.

    Raises: UserError: it cannot be made.
    """
    base = Path(output_dir).expanduser().absolute()
    if reason := why_not_writable(base):
        raise _cannot_make(base, reason)


def _cannot_make(base: Path, reason: str | None) -> UserError:
    return UserError(
        f"output_dir: cannot make a folder in {base}: {reason}; choose another one, as "
        "output_dir=runs/vapo"
    )


def _check_own_places(run_dir: Path) -> None:
    """Check that what a resumed run writes stays in its folder, which may be somebody else's.

    Its checkpoints may lie on another disk, but not in the folder of another run.

    Raises: UserError: a link leads out of the folder; it names the link.
    """
    folders = ("tracking", "rollouts", "pretrained_critic", "averaged_policy", "logs")
    for name in (".lock", *folders, "csv", "wandb"):
        path = run_dir / name
        if path.is_symlink() or (name == ".lock" and path.exists() and not path.is_file()):
            raise UserError(
                f"{path} is a link, or not a regular file, and a run writes into its own folder "
                "alone: put there what the link leads to, or remove it"
            )
    checkpoints = run_dir / "checkpoints"
    other_run = checkpoints.resolve().parent
    if checkpoints.is_symlink() and is_run_folder(other_run):
        raise UserError(
            f"{checkpoints} is a link to the checkpoints of {other_run}, which is another run: "
            "resume that one, or put a copy of its checkpoints there"
        )


def open_run_dir(config: FitConfig, name: str, *, resume: Resume | None) -> RunDir:
    """Make a new run's folder, or open the resumed run's. The first process locks it.

    Raises: UserError: it cannot be written, or another process is at work in it.
    """
    identity = identity_of(config)
    if resume is not None:
        path = resume.run_dir
        _check_own_places(path)
        record = read_record(path)
        is_same = record.get("identity") == identity
        run_id = record.get("mlflow_run_id")
        run_id = run_id if is_run_id(run_id) else None
        run_dir = RunDir(path, identity, run_id, number_of(path), is_same)
        try:
            run_dir.lock()
            if is_main_process():
                (path / SUMMARY_NAME).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot write in {path}: {error.strerror}") from None
        return run_dir
    base = Path(config.output_dir).expanduser().absolute()
    if not is_main_process():
        return RunDir(base, identity)
    new_folders = missing_folders(base)
    with taken_back_if_refused(new_folders, FIRST_FILES):
        run_dir = RunDir(make_run_dir(base, name), identity, new_folders=new_folders)
        new_folders.insert(0, run_dir.path)
        run_dir.lock()
        try:
            with folder_locked(base):  # of two that begin at once, too, one is the first
                run_dir.number = 1 + max(map(number_of, newest_first(base)), default=0)
                run_dir.record("begun", None)
        except OSError as error:
            raise _cannot_make(base, error.strerror) from error
        write_text(run_dir.path / CONFIG_NAME, to_yaml(config))
    return run_dir
