"""What engines share that sample step by step: requests at any time, results as they come."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Generated, Request


class SteppedEngine(ABC):
    """The `Engine` over an engine's own steps.

    Several callers may have requests under way, also in several threads: a step that one of them
    makes samples for all, and each takes its own results.
    """

    is_shared = False

    def __init__(self) -> None:
        self._results: dict[str, Generated] = {}
        self._in_use = threading.RLock()
        self._next = threading.Lock()  # who has it is next to use the engine
        self._numbers = itertools.count()

    @abstractmethod
    def _begin(
        self,
        requests: Mapping[str, Request],
        settings: SamplingSettings,
        end_ids: frozenset[int],
    ) -> None:
        """Take in requests, by name."""

    @abstractmethod
    def _step(self) -> Mapping[str, Generated]:
        """Sample on for a short while; the results that are new."""

    @abstractmethod
    def _drop(self, names: Collection[str]) -> None:
        """Forget requests that may be under way."""

    def submit(
        self,
        requests: Mapping[str, Request],
        settings: SamplingSettings,
        *,
        end_ids: frozenset[int],
    ) -> None:
        """See `Engine.submit`."""
        with self._turn():
            self._begin(requests, settings, end_ids)

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        """See `Engine.results`."""
        with self._turn():
            if not any(name in names for name in self._results):
                self._results.update(self._step())
            ready = [name for name in self._results if name in names]
            return {name: self._results.pop(name) for name in ready}

    def abort(self, names: Collection[str]) -> None:
        """See `Engine.abort`."""
        with self._turn():
            self._drop([name for name in names if self._results.pop(name, None) is None])

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Around each use of the engine: a thread that waits is before the one that steps on."""
        with self._next:
            self._in_use.acquire()
        try:
            yield
        finally:
            self._in_use.release()

    def leave(self) -> None:
        """Nobody else waits for its steps."""
        return
