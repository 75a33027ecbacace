"""A sweep's folder: one folder for each task, found again by the task's identity.

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
import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vapo.errors import UserError
from vapo.runs.run_dirs import order_of_runs
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Plan, Task
from vapo.system.files import try_lock, write_text
from vapo.system.made_folders import make_folders, taken_back_if_refused
from vapo.system.shown_text import format_seconds
from vapo.tracking.journal_folders import read_target

SWEEP_RECORD = "sweep.json"
_LOG_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """What became of a task. `reason`: the end of a failed run's log.

    `seconds` are those of its last process, so of a part of the run if that resumed from a
    checkpoint.
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
    def __init__(self, sweep_dir: Path, task: Task) -> None:
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", task.name).strip("-").lower()
        existing = sorted((sweep_dir / "runs").glob(f"*_{task.identity}"))
        own = sweep_dir / "runs" / f"{slug}_{task.identity}"
        self.path = existing[0] if existing else own  # the row may have had another name
        self.task = task
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.txt"
        self.output_dir = self.path / "fit"

    def attempts(self) -> list[Path]:
        """The run folders of this task, oldest first; more than one after early kills."""
        return sorted(filter(Path.is_dir, self.output_dir.glob("*")), key=order_of_runs)

    def checkpoint(self) -> Path | None:
        """Where an interrupted run resumes; None: it starts from the beginning."""
        found = [path / "checkpoints" / "last.ckpt" for path in self.attempts()]
        return next((path for path in reversed(found) if path.exists()), None)

    def finished(self) -> Outcome | None:
        """The outcome of a run that was completed earlier."""
        with contextlib.suppress(OSError, ValueError):
            status = json.loads((self.path / "status.json").read_text())
            outcome = Outcome(**{**status["outcome"], "was_done": True})
            if outcome.state == "finished" and Path(str(outcome.run_dir)).is_dir():
                return outcome
        return None

    def end(self, returncode: int, seconds: float, *, was_resumed: bool = False) -> Outcome:
        """Read what the process left, and record it."""
        done = [path for path in self.attempts() if (path / "summary.json").is_file()]
        if returncode or not done:
            lines = []
            with contextlib.suppress(OSError):
                lines = self.log.read_text(errors="replace").rstrip().splitlines()[-_LOG_LINES:]
            lines.append(
                f"exit code {returncode}" if returncode >= 0 else f"killed by signal {-returncode}"
            )
            reason = "\n".join(lines).strip()
            outcome = Outcome("failed", seconds, reason=reason, was_resumed=was_resumed)
        else:
            summary = json.loads((done[-1] / "summary.json").read_text())
            score, run_id = summary.get("score_after"), summary.get("mlflow_run_id")
            run_dir = str(done[-1])
            outcome = Outcome("finished", seconds, score, run_id, run_dir, was_resumed=was_resumed)
        task = {"name": self.task.name, "identity": self.task.identity}
        contents = {**task, "outcome": asdict(outcome), "code": code_version()}
        write_text(self.path / "status.json", json.dumps(contents, indent=2) + "\n")
        return outcome


def pretraining_of(critic: str) -> str | None:
    """The identity of the value pretraining whose critic lies at a path in a sweep's folder."""
    found = re.search(r"_([0-9a-f]{12})/fit/[^/]+/pretrained_critic/?$", critic)
    return found[1] if found else None


@contextlib.contextmanager
def locked(sweep_dir: Path) -> Iterator[int]:
    """Hold the sweep's folder; yields the lock's file descriptor, which the runs inherit.

    So the lock is also held by runs that outlive a killed sweep, and no run is started twice.

    Raises: UserError when a sweep, or a run that it started, is at work there.
    """
    try:
        made = make_folders(sweep_dir)
        lock = (sweep_dir / ".lock").open("w")
    except OSError as error:
        raise UserError(f"--sweep_dir: cannot write in {sweep_dir}: {error.strerror}") from None
    with lock, taken_back_if_refused(made, (".lock",)):
        if not try_lock(lock, with_children=True):
            raise UserError(
                f"another sweep, or a run that it left behind, is at work in {sweep_dir}: wait "
                "for it or stop it (a run whose sweep was killed stops at its next safe point), or "
                "give another --sweep_dir"
            )
        yield lock.fileno()


def describe_finished(plan: Plan, sweep_dir: Path) -> list[str]:
    """The dry run's last lines: what has finished already, and how long that took."""
    outcomes = {task.name: TaskFolder(sweep_dir, task).finished() for task in plan.tasks}
    finished = {name: outcome for name, outcome in outcomes.items() if outcome}
    took: dict[str, list[float]] = {}
    for name, outcome in finished.items():
        if not outcome.was_resumed:  # else its seconds are of its last part
            took.setdefault(name.rpartition("/")[0], []).append(outcome.seconds)
    lines = [f"{len(finished)} of {len(outcomes)} processes have finished already in {sweep_dir}"]
    if took:
        lines += ["", "How long it took before, in this folder:"]
    for name, seconds in took.items():
        ends = dict.fromkeys(map(format_seconds, (min(seconds), max(seconds))))
        lines.append(f"- {name}: {len(seconds)} finished, took {' to '.join(ends)}")
    return lines


@dataclass(frozen=True)
class SweepFolder:
    path: Path
    parent_run_id: str
    tracking_uri: str


def read_sweep_folder(folder: Path, tracking_uri: str | None) -> SweepFolder:
    """The sweep of a folder; a `tracking_uri` of None is the one that its runs recorded.

    Raises: UserError that names the folder and what it lacks, with the nearest that has it.
    """
    path = folder.expanduser().absolute()
    record = path / SWEEP_RECORD
    if not record.is_file():
        what = "is not a folder" if path.exists() else "there is no such folder"
        if path.is_dir():
            what = f"there is no {SWEEP_RECORD} in it, so it is not the folder of a sweep"
        raise UserError(f"SWEEP_FOLDER {path}: {what}{_hint(path)}")
    try:
        parent_run_id = str(json.loads(record.read_text())["parent_run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"SWEEP_FOLDER: {record} is not the record of a sweep: give the id that `vapo sweep` "
            "printed, as --sweep ID"
        ) from None
    # where the latest of its runs were recorded, without credentials
    found = sorted(path.glob("runs/*/fit/*/tracking"), key=lambda one: one.stat().st_mtime)
    targets = (read_target(tracking) for tracking in reversed(found))
    recorded = (str(target["tracking_uri"]) for target in targets if target)
    if (uri := tracking_uri or next(recorded, None)) is None:
        raise UserError(
            f"SWEEP_FOLDER: no run in {path / 'runs'} says where it was recorded: give "
            "--tracking_uri"
        )
    return SweepFolder(path, parent_run_id, uri)


def _hint(path: Path) -> str:
    """Sweeps near a path that is none: the one around it, those in it or beside it."""
    around = next((one for one in path.parents if (one / SWEEP_RECORD).is_file()), None)
    if around is not None:
        return f"; the sweep around it is {around}"
    folder = path if path.is_dir() else path.parent
    names = sorted(record.parent.name for record in folder.glob(f"*/{SWEEP_RECORD}"))
    if folder != path:
        names = difflib.get_close_matches(path.name, names) or names
    if names:
        return f"; sweeps in {folder}: {', '.join(names)}"
    return "; `vapo sweep` prints its folder, and --sweep takes the id of its parent run"
