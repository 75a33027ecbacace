"""A run at work and how far it is, by the journal in its folder; how long a sweep's rest takes."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from vapo.config import FitConfig, resolve
from vapo.sweep.folders import Outcome, TaskFolder
from vapo.sweep.launch import Handle
from vapo.sweep.plan import Task
from vapo.tracking.journal import JOURNAL_NAME, read_from

_ITERATION, _SCORE = "progress/iteration", "eval/avg_at_k"
_EXPLAINED_VARIANCE = "critic/explained_variance"


@dataclass
class Running:
    """A task whose process was started.

    Args:
        started, started_at: by the monotonic clock, and as Unix time, in seconds.
        latest: of each metric that the run recorded, the latest value.
    """

    task: Task
    folder: TaskFolder
    handle: Handle
    was_resumed: bool = False
    started: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    latest: dict[str, float] = field(default_factory=dict)
    _journal: Path | None = field(default=None, init=False, repr=False)
    _read_bytes: int = field(default=0, init=False, repr=False)

    @property
    def iteration(self) -> int:
        """How many iterations are done, as the run records it."""
        return int(self.latest.get(_ITERATION, 0))

    def read(self) -> None:
        """Take in what the run has recorded since the last call; nothing while it starts up."""
        with contextlib.suppress(OSError):  # not made yet, or of a file system that is away
            journal = self._find_journal()
            if journal is None:
                return
            if journal != self._journal:
                self._journal, self._read_bytes = journal, 0
            records, self._read_bytes = read_from(journal, self._read_bytes)
            for record in records:
                if record.kind == "metrics":
                    self.latest.update((key, value) for key, value, *_ in record.payload)

    def _find_journal(self) -> Path | None:
        """Of this process: an earlier attempt's was not written to since it was started."""
        for attempt in reversed(self.folder.attempts()):
            file = attempt / "tracking" / JOURNAL_NAME
            if file.is_file() and file.stat().st_mtime >= self.started_at:
                return file.parent
        return None

    def describe(self) -> str:
        """`iteration 12 of 40, score 45.3 %`; of a value pretraining, what its critic explains."""
        if not self.latest:
            return "starting"
        parts = [f"iteration {self.iteration} of {num_iterations(self.task.config)}"]
        if self.task.is_pretraining:
            if _EXPLAINED_VARIANCE in self.latest:
                parts.append(f"explained variance {self.latest[_EXPLAINED_VARIANCE]:.2f}")
        elif _SCORE in self.latest:
            parts.append(f"score {100 * self.latest[_SCORE]:.1f} %")
        return ", ".join(parts)


def num_iterations(config: FitConfig) -> int:
    """Of both phases; value pretraining may stop before its last one."""
    numbers = resolve(config)
    pretraining = numbers.value_pretraining_iterations if config.algorithm.has_critic else 0
    return pretraining + config.training.num_iterations


def seconds_left(
    tasks: Sequence[Task], outcomes: Mapping[str, Outcome], running: Sequence[Running], jobs: int
) -> float | None:
    """Until all is done, `jobs` at a time; None where a task's time is not known, or none is left.

    A run under way is expected to go on at its own pace, once it has done an iteration. Other
    runs are expected from those of this session: as long as the row's own runs took, or else as
    its iterations take in other rows. A value pretraining is expected from value pretrainings
    alone and a row from rows: an iteration that trains the critic takes a part of the time of one
    that samples and trains both. Until one of their kind has finished those of earlier sessions
    count, which may have shared the machine otherwise. A resumed run's seconds are a part of it,
    and do not count.
    """
    paces = {run.task.identity: pace for run in running if (pace := _seconds_at_its_pace(run))}
    of_row, of_iteration = defaultdict(list), defaultdict(list)
    for task, seconds in _timed(tasks, outcomes, paces):
        of_row[_row(task)].append(seconds)
        of_iteration[task.is_pretraining].append(seconds / _num_iterations(task))
    elapsed = {run.task.identity: time.monotonic() - run.started for run in running}
    left = {}
    for task in tasks:
        if task.identity in outcomes:
            continue
        if (expected := paces.get(task.identity)) is None:
            if _row(task) in of_row:
                expected = fmean(of_row[_row(task)])
            elif task.is_pretraining in of_iteration:
                expected = fmean(of_iteration[task.is_pretraining]) * _num_iterations(task)
            else:
                return None
        left[task.identity] = max(0.0, expected - elapsed.get(task.identity, 0.0))
    return _seconds_of_work(tasks, left, elapsed.keys(), jobs) if left else None


def _timed(
    tasks: Sequence[Task], outcomes: Mapping[str, Outcome], paces: Mapping[str, float]
) -> list[tuple[Task, float]]:
    """The runs to expect others from; those under way for rows of which none has finished."""
    finished = [(task, outcomes[task.identity]) for task in tasks if task.identity in outcomes]
    whole = [(t, o) for t, o in finished if o.state == "finished" and not o.was_resumed]
    timed = []
    for kind in (True, False):
        of_kind = [(task, outcome) for task, outcome in whole if task.is_pretraining == kind]
        own = [(task, outcome) for task, outcome in of_kind if not outcome.was_done]
        timed += [(task, outcome.seconds) for task, outcome in own or of_kind]
    known = {_row(task) for task, _ in timed}
    at_work = [task for task in tasks if task.identity in paces and _row(task) not in known]
    return timed + [(task, paces[task.identity]) for task in at_work]


def _seconds_at_its_pace(run: Running) -> float | None:
    """How long the whole run takes if its iterations go on as they did; None: not known yet."""
    if run.was_resumed or not run.iteration:
        return None
    elapsed = time.monotonic() - run.started
    return elapsed / run.iteration * _num_iterations(run.task)


def _seconds_of_work(
    tasks: Sequence[Task], left: Mapping[str, float], running: Iterable[str], jobs: int
) -> float:
    """The time at which the last one ends, if each is started as `Work` starts them: in order,
    as soon as one ends, and after what it needs."""
    at_work = [(left[identity], identity) for identity in running if identity in left]
    heapq.heapify(at_work)
    started, now = {identity for _, identity in at_work}, 0.0
    waiting = [task for task in tasks if task.identity in left and task.identity not in started]
    open_ = set(left)
    while waiting or at_work:
        for task in list(waiting):
            if len(at_work) < jobs and task.needs not in open_:
                heapq.heappush(at_work, (now + left[task.identity], task.identity))
                waiting.remove(task)
        now, ended = heapq.heappop(at_work)
        open_.remove(ended)
    return now


def _row(task: Task) -> tuple[str, bool]:
    return task.row.name, task.is_pretraining


def _num_iterations(task: Task) -> int:
    return max(1, num_iterations(task.config))
