"""A run at work, and how far it is: read from the journal in its own folder."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from vapo.config import FitConfig, resolve
from vapo.sweep.folders import TaskFolder
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
        found = [path / "tracking" for path in self.folder.attempts()]
        times = {
            path: (path / JOURNAL_NAME).stat().st_mtime
            for path in found
            if (path / JOURNAL_NAME).is_file()
        }
        newest = max(times, key=lambda path: times[path], default=None)
        return newest if newest is not None and times[newest] >= self.started_at else None

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
