"""What engines share that sample step by step: requests at any time, results as they come."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import Generated, Request


class SteppedEngine(ABC):
    """The `StreamEngine` over an engine's own steps; `generate` is written on it.

    Several callers may have requests under way, also in several threads: a step that one of them
    makes samples for all, and each takes its own results.
    """

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
        """See `StreamEngine.submit`."""
        with self._turn():
            self._begin(requests, settings, end_ids)

    def results(self, names: Collection[str]) -> dict[str, Generated]:
        """See `StreamEngine.results`."""
        with self._turn():
            if not any(name in names for name in self._results):
                self._results.update(self._step())
            ready = [name for name in self._results if name in names]
            return {name: self._results.pop(name) for name in ready}

    def abort(self, names: Collection[str]) -> None:
        """See `StreamEngine.abort`."""
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

    def generate(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        *,
        end_ids: frozenset[int],
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Generated]:
        """See `Engine.generate`."""
        batch = next(self._numbers)
        named = {f"batch {batch}, {place}": request for place, request in enumerate(requests)}
        left, found = set(named), dict[str, Generated]()
        try:
            if left:
                self.submit(named, settings, end_ids=end_ids)
            while left:
                if done := self.results(left):
                    found.update(done)
                    left.difference_update(done)
                    advance(len(done))
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self.abort(left)
            raise
        return [found[name] for name in named]
