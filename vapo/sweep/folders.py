"""The folder of a sweep, with a folder for each task. A task's identity is part of its name.

<sweep_dir>/
    sweep.json                       the parent MLflow run, and the latest plan
    runs/<name>_<identity>/
        config.yaml                  what the process is started with
        log.txt                      its output
        status.json                  its state, written when it ends
        fit/<UTC time>_<name>/           the run's own folder, as `vapo fit` makes it
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vapo.config.run_folders import RECORD_NAME
from vapo.errors import UserError
from vapo.errors.shown_text import format_seconds
from vapo.errors.suggestions import nearest_name, nearest_names
from vapo.files.made_folders import make_folders, taken_back_if_refused
from vapo.files.whole_files import try_lock, write_text
from vapo.runs.run_dirs import order_of_runs
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, Task
from vapo.tracking.journal_folders import read_target

SWEEP_RECORD = "sweep.json"
_LOG_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """How a task ended, or that it has not ended (`waiting`).

    Attributes:
        seconds: how long the task's last process took. If that process resumed a run
            (`was_resumed`), it is only a part of the run.
        score: the run's last score, a share from 0 to 1; None without an evaluation.
        reason: the end of a failed run's log, or why a `blocked` task was not started.
        was_done: whether the task had finished before this sweep was started.
    """

    state: Literal["finished", "failed", "blocked", "waiting"]
    seconds: float = 0.0
    score: float | None = None
    mlflow_run_id: str | None = None
    run_dir: str | None = None
    reason: str = ""
    was_done: bool = False
    was_resumed: bool = False


class TaskFolder:
    """The folder of one task within the sweep's folder, with the paths of its files.

    If a folder with the task's identity exists, it is used, whatever name it has.
    """

    def __init__(self, sweep_dir: Path, task: Task) -> None:
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", task.name).strip("-").lower()
        existing = sorted((sweep_dir / "runs").glob(f"*_{task.identity}"))
        new_folder = sweep_dir / "runs" / f"{slug}_{task.identity}"
        self.path = existing[0] if existing else new_folder  # the row may have had another name
        self.task = task
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.txt"
        self.output_dir = self.path / "fit"

    def attempts(self) -> list[Path]:
        """Return the run folders of this task, oldest first.

        There are several when a run was killed before its first checkpoint and started anew.
        """
        return sorted(filter(Path.is_dir, self.output_dir.glob("*")), key=order_of_runs)

    def checkpoint(self) -> Path | None:
        """Return the checkpoint from which an interrupted run resumes; None if there is none."""
        checkpoints = [path / "checkpoints" / "last.ckpt" for path in self.attempts()]
        return next((path for path in reversed(checkpoints) if path.exists()), None)

    def finished(self) -> Outcome | None:
        """Return the outcome of a run that finished in an earlier sweep; None if there is none.

        It is None, too, if the run's folder is gone or `status.json` cannot be read.
        """
        with contextlib.suppress(OSError, ValueError):
            status = json.loads((self.path / "status.json").read_text())
            outcome = Outcome(**{**status["outcome"], "was_done": True})
            if outcome.state == "finished" and Path(str(outcome.run_dir)).is_dir():
                return outcome
        return None

    def end(self, returncode: int, seconds: float, *, was_resumed: bool = False) -> Outcome:
        """Record in `status.json` how the task's process ended, and return it.

        The score and the ids come from the summary that the process wrote. A process that wrote
        none has failed, even with exit code 0.

        Args:
            returncode: the process's exit code, or minus the signal that killed it.
            seconds: how long the process took.
            was_resumed: whether the process resumed a run.
        """
        finished_attempts = [path for path in self.attempts() if (path / "summary.json").is_file()]
        if returncode or not finished_attempts:
            lines = []
            with contextlib.suppress(OSError):
                lines = self.log.read_text(errors="replace").rstrip().splitlines()[-_LOG_LINES:]
            lines.append(
                f"exit code {returncode}" if returncode >= 0 else f"killed by signal {-returncode}"
            )
            reason = "\n".join(lines).strip()
            outcome = Outcome("failed", seconds, reason=reason, was_resumed=was_resumed)
        else:
            summary = json.loads((finished_attempts[-1] / "summary.json").read_text())
            score, run_id = summary.get("score_after"), summary.get("mlflow_run_id")
            run_dir = str(finished_attempts[-1])
            outcome = Outcome("finished", seconds, score, run_id, run_dir, was_resumed=was_resumed)
        task = {"name": self.task.name, "identity": self.task.identity}
        contents = {**task, "outcome": asdict(outcome), "code": code_version()}
        write_text(self.path / "status.json", json.dumps(contents, indent=2) + "\n")
        return outcome


def pretraining_identity(critic: str) -> str | None:
    """Return the identity of the value pretraining that wrote a critic; None if no sweep wrote it.

    Args:
        critic: the path of the critic's folder, which contains the identity.
    """
    match = re.search(r"_([0-9a-f]{12})/fit/[^/]+/pretrained_critic/?$", critic)
    return match[1] if match else None


@contextlib.contextmanager
def locked(sweep_dir: Path) -> Iterator[int]:
    """Lock the sweep's folder, and yield the lock's file descriptor, which the runs inherit.

    A run that outlives a killed sweep therefore still holds the lock, so that it is not started a
    second time.

    Raises: UserError: a sweep, or a run that a sweep started, is at work in the folder, or the
    folder cannot be written.
    """
    try:
        new_folders = make_folders(sweep_dir)
        lock = (sweep_dir / ".lock").open("w")
    except OSError as error:
        raise UserError(f"--sweep_dir: cannot write in {sweep_dir}: {error.strerror}") from None
    with lock, taken_back_if_refused(new_folders, (".lock",)):
        if not try_lock(lock, with_children=True):
            raise UserError(
                f"another sweep, or a run that it left behind, is at work in {sweep_dir}: wait "
                "for it or stop it (a run whose sweep was killed stops at its next safe point), or "
                "give another --sweep_dir"
            )
        yield lock.fileno()


def describe_finished(plan: Plan, sweep_dir: Path) -> list[str]:
    """Return the dry run's last lines: how many tasks have finished, and how long they took."""
    outcomes = {task.name: TaskFolder(sweep_dir, task).finished() for task in plan.tasks}
    finished = {name: outcome for name, outcome in outcomes.items() if outcome}
    durations: dict[str, list[float]] = {}
    for name, outcome in finished.items():
        if not outcome.was_resumed:  # else the seconds cover the last part alone
            durations.setdefault(name.rpartition("/")[0], []).append(outcome.seconds)
    lines = [f"{len(finished)} of {len(outcomes)} processes have finished already in {sweep_dir}"]
    if durations:
        lines += ["", "How long it took before, in this folder:"]
    for name, seconds in durations.items():
        ends = dict.fromkeys(map(format_seconds, (min(seconds), max(seconds))))
        lines.append(f"- {name}: {len(seconds)} finished, took {' to '.join(ends)}")
    return lines


@dataclass(frozen=True)
class SweepFolder:
    """An existing sweep's folder, the id of its parent run, and the MLflow store that has its
    runs.
    """

    path: Path
    parent_run_id: str
    tracking_uri: str


def read_sweep_folder(folder: Path, tracking_uri: str | None) -> SweepFolder:
    """Read from a sweep's folder which sweep it belongs to, and where its runs were recorded.

    Args:
        tracking_uri: replaces the store that the runs themselves recorded.

    Raises: UserError: the folder lacks something. If it has no sweep record, the error lists sweeps
    nearby.
    """
    path = folder.expanduser().absolute()
    record = path / SWEEP_RECORD
    if not record.is_file():
        problem = "is not a folder" if path.exists() else "there is no such folder"
        if path.is_dir():
            problem = (
                f"there is no {SWEEP_RECORD} in it, so it is not the folder of a sweep, and no "
                "tracking/target.json, so it is not that of a run"
            )
        raise UserError(f"FOLDER {path}: {problem}{_hint(path)}")
    try:
        parent_run_id = str(json.loads(record.read_text())["parent_run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"FOLDER: {record} is not the record of a sweep: give the id that `vapo sweep` "
            "printed, as --sweep ID"
        ) from None
    # the store of the latest runs, without credentials
    tracking_folders = sorted(
        path.glob("runs/*/fit/*/tracking"),
        key=lambda tracking_folder: tracking_folder.stat().st_mtime,
    )
    targets = (read_target(tracking) for tracking in reversed(tracking_folders))
    recorded = (str(target["tracking_uri"]) for target in targets if target)
    if (uri := tracking_uri or next(recorded, None)) is None:
        raise UserError(
            f"FOLDER: no run in {path / 'runs'} says where it was recorded: give --tracking_uri"
        )
    return SweepFolder(path, parent_run_id, uri)


@dataclass(frozen=True)
class RunFolders:
    """Folders of runs, the ids of these runs in the same order, and the MLflow store that has
    them.
    """

    paths: Sequence[Path]
    run_ids: Sequence[str]
    tracking_uri: str


def read_run_folders(folders: Sequence[Path], tracking_uri: str | None) -> RunFolders | None:
    """Read from folders which runs they belong to, and where these runs were recorded.

    The result is None for a single folder that is not a run's: it may be a sweep's.

    Args:
        tracking_uri: replaces the store that the runs themselves recorded.

    Raises: UserError: one of several folders is not a run's, or their stores differ.
    """
    paths = [folder.expanduser().absolute() for folder in folders]
    run_ids, uris = [], dict[str, Path]()
    for path in paths:
        target = read_target(path / "tracking")
        if target is None and len(paths) == 1:
            return None
        if target is None:
            raise UserError(f"FOLDER {path}: {_why_no_run(path)}")
        run_ids.append(str(target["mlflow_run_id"]))
        uris.setdefault(tracking_uri or str(target["tracking_uri"]), path)
    if len(uris) > 1:
        stores = "; ".join(f"{path} in {uri}" for uri, path in uris.items())
        raise UserError(
            f"the runs were recorded in different stores, and a report reads one: {stores}"
        )
    return RunFolders(paths, run_ids, next(iter(uris)))


def _why_no_run(path: Path) -> str:
    """Return why a path is not the folder of a run. If nothing is there, name the nearest run."""
    if (path / SWEEP_RECORD).is_file():
        return "it is the folder of a sweep, which has a report of its own: vapo report FOLDER"
    if path.exists():
        return "it is not the folder of a run, which has tracking/target.json"
    names = [record.parent.name for record in path.parent.glob(f"*/{RECORD_NAME}")]
    nearest = nearest_name(path.name, names)
    hint = f"; did you mean {path.parent / nearest}?" if nearest else ""
    return f"there is no such folder{hint}"


def _hint(path: Path) -> str:
    """Return a text that names sweeps near a path: around it, in it or next to it.

    The path itself is not a sweep's folder.
    """
    around = next((parent for parent in path.parents if (parent / SWEEP_RECORD).is_file()), None)
    if around is not None:
        return f"; the sweep around it is {around}"
    folder = path if path.is_dir() else path.parent
    names = sorted(record.parent.name for record in folder.glob(f"*/{SWEEP_RECORD}"))
    if folder != path:
        names = nearest_names(path.name, names) or names
    if names:
        return f"; sweeps in {folder}: {', '.join(names)}"
    return "; `vapo sweep` prints its folder, and --sweep takes the id of its parent run"
