"""How long the rest of a sweep takes, from the runs that have finished or are under way."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from vapo.sweep.folders import Outcome
from vapo.sweep.plan import Task
from vapo.sweep.running import Running, num_iterations


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
        of_iteration[task.is_pretraining].append(seconds / _iterations(task))
    elapsed = {run.task.identity: time.monotonic() - run.started for run in running}
    left = {}
    for task in tasks:
        if task.identity in outcomes:
            continue
        if (expected := paces.get(task.identity)) is None:
            if _row(task) in of_row:
                expected = fmean(of_row[_row(task)])
            elif task.is_pretraining in of_iteration:
                expected = fmean(of_iteration[task.is_pretraining]) * _iterations(task)
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
    return elapsed / run.iteration * _iterations(run.task)


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


def _iterations(task: Task) -> int:
    return max(1, num_iterations(task.config))
