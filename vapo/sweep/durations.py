"""How long the rest of a sweep takes, from its runs that have finished; nothing else is known."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from vapo.sweep.folders import Outcome
from vapo.sweep.plan import Task
from vapo.sweep.running import Running, num_iterations


class Durations:
    """What to expect of a task, by the seconds that finished ones took.

    As long as the row's own runs took, or else as its iterations take in other rows. Value
    pretrainings are estimated from value pretrainings, rows from rows, where there are any.
    """

    def __init__(self, timed: Iterable[tuple[Task, float]]) -> None:
        of_row, of_iteration = defaultdict(list), defaultdict(list)
        for task, seconds in timed:
            of_row[task.row.name, task.is_pretraining].append(seconds)
            of_iteration[task.is_pretraining].append(seconds / _iterations(task))
        self._of_row = {key: fmean(values) for key, values in of_row.items()}
        self._of_iteration = {key: fmean(values) for key, values in of_iteration.items()}

    def expected_seconds(self, task: Task) -> float | None:
        """None where nothing has finished."""
        key = (task.row.name, task.is_pretraining)
        if key in self._of_row or not self._of_iteration:
            return self._of_row.get(key)
        other_kind = self._of_iteration.get(not task.is_pretraining, 0.0)
        return self._of_iteration.get(task.is_pretraining, other_kind) * _iterations(task)


def seconds_left(
    tasks: Sequence[Task], outcomes: Mapping[str, Outcome], running: Sequence[Running], jobs: int
) -> float | None:
    """Until all is done, `jobs` at a time; None where no run has finished or none is left.

    Runs of this session count. Until one of them has finished those of earlier ones do, which
    may have shared the machine otherwise. A resumed run's seconds are a part of it, and do not.
    """
    finished = [(task, outcomes[task.identity]) for task in tasks if task.identity in outcomes]
    whole = [(t, o) for t, o in finished if o.state == "finished" and not o.was_resumed]
    own = [(task, outcome.seconds) for task, outcome in whole if not outcome.was_done]
    durations = Durations(own or [(task, outcome.seconds) for task, outcome in whole])
    elapsed = {run.task.identity: time.monotonic() - run.started for run in running}
    left = []
    for task in tasks:
        if task.identity not in outcomes:
            expected = durations.expected_seconds(task)
            if expected is None:
                return None
            left.append(max(0.0, expected - elapsed.get(task.identity, 0.0)))
    return sum(left) / min(jobs, len(left)) if left else None


def _iterations(task: Task) -> int:
    return max(1, num_iterations(task.config))
