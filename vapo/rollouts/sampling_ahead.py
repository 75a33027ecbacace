"""The next iteration's rollouts, sampled in a thread while the main thread trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from vapo.types import Phase, RolloutBatch


class Stage(Protocol):
    """How a stage of an iteration reports progress: `Progress.stage`, or a thread's own version."""

    def __call__(
        self, name: str, total: float | None = None, unit: str = "items"
    ) -> AbstractContextManager[Callable[[float], None]]: ...


@dataclass(frozen=True)
class SampledRollouts:
    """An iteration's rollouts, and the policy and phase that they were sampled in."""

    iteration: int
    policy_iterations: int
    phase: Phase
    batch: RolloutBatch
    metrics: dict[str, float]


class CancelledAheadError(Exception):
    """The run is ending: the work stops the next time it reports progress."""


class WorkAhead:
    """Runs one piece of work at a time in a thread; its result is taken once.

        start(work) -> ... -> wait() -> take()

    An error in the thread is raised, as the same object, by `wait`. `cancel` ends the thread
    and joins it: the work notices when it enters a stage or reports progress.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts-ahead")
        self._future: Future[SampledRollouts] | None = None
        self._ends = threading.Event()
        self.seconds = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether there is work whose result has not been taken."""
        return self._future is not None

    def start(self, work: Callable[[Stage], SampledRollouts]) -> None:
        """Start `work` in the thread; it gets the stage to which it reports progress.

        Raises: RuntimeError when the result of other work has not been taken.
        """
        if self._future is not None:
            raise RuntimeError("rollouts are already being sampled ahead")
        self._future = self._executor.submit(self._timed, work)

    def wait(self) -> SampledRollouts | None:
        """Block until the work is done and return its result; without work, None at once."""
        if self._future is None:
            return None
        try:
            return self._future.result()
        except CancelledAheadError:
            self._future = None
            return None
        except BaseException:
            if self._future.done():  # the work's own error, not an interrupt of this wait
                self._future = None
            raise

    def take(self) -> SampledRollouts | None:
        """Wait for the result, return it and forget it; None if there is no work."""
        result = self.wait()
        self._future = None
        return result

    def cancel(self) -> None:
        """End the work and join the thread; nothing can be started afterwards."""
        self._ends.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._future = None

    def _timed(self, work: Callable[[Stage], SampledRollouts]) -> SampledRollouts:
        started = time.monotonic()
        result = work(self._stage)
        self.seconds = time.monotonic() - started
        return result

    @contextmanager
    def _stage(
        self, name: str, total: float | None = None, unit: str = "items"
    ) -> Iterator[Callable[[float], None]]:
        self._advance()
        yield self._advance

    def _advance(self, n: float = 1.0) -> None:
        if self._ends.is_set():
            raise CancelledAheadError
