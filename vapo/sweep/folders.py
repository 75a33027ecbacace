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
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vapo.errors import UserError
from vapo.runs.run_dirs import order_of_runs
from vapo.sweep.identity import code_version
from vapo.sweep.plan import Task
from vapo.system.atomic_files import write_text
from vapo.system.file_locks import try_lock

SWEEP_RECORD = "sweep.json"
TaskState = Literal["finished", "failed", "blocked", "waiting"]
_LOG_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """What became of a task. `reason`: the end of a failed run's log.

    `seconds` are those of its last process, so of a part of the run if that resumed from a
    checkpoint.
    """

    state: TaskState
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
        sweep_dir.mkdir(parents=True, exist_ok=True)
        lock = (sweep_dir / ".lock").open("w")
    except OSError as error:
        raise UserError(f"--sweep_dir: cannot write in {sweep_dir}: {error.strerror}") from None
    with lock:
        if not try_lock(lock, with_children=True):
            raise UserError(
                f"another sweep, or a run that it left behind, is at work in {sweep_dir}: wait "
                "for it or stop it, or give another --sweep_dir"
            )
        yield lock.fileno()
