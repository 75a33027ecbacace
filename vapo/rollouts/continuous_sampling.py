"""The rollouts of coming iterations, sampled in a thread that does not wait for the trainer.

    allow(iteration) -> ... -> take(iteration) -> train, new weights -> allow(iteration + 1) -> ...

The thread plays the episodes of one iteration after the other, as far ahead as is allowed, and
begins with the next as soon as there is room: nobody waits for an iteration's longest episode but
who trains on it. Which prompts an iteration has does not depend on what is fast. The engine's
weights may change between two steps; episodes under way go on with the new ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from vapo.rollouts.collection import Filling, RolloutCollection
from vapo.rollouts.episodes import Episode, EpisodeLoop, Key
from vapo.rollouts.player import ask
from vapo.types import Phase

THREAD_NAME = "rollouts-ahead"
_POLL_S = 0.2


@dataclass
class _Iteration:
    """One iteration's groups, as they fill up; the trainer reads them when all are there."""

    index: int
    filling: Filling
    rows: list[Key] = field(default_factory=list)  # of the attempt under way
    ended: dict[Key, Episode] = field(default_factory=dict)
    num_ended: int = 0  # in all attempts
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    is_there: threading.Event = field(default_factory=threading.Event)


class ContinuousSampling:
    """The thread, from the first iteration that is sampled to the end of the run.

    It does what it is asked to between two steps of the engine. An error in it is raised, as the
    same object, by whoever waits for it next. Who waits is shown as a stage of the run's progress,
    whose `poll` is called every 0.2 s and may raise, to stop waiting.

    Args:
        phase: the one that trains on what is sampled.
        first: the first iteration that it samples, counted from 0.
    """

    def __init__(self, collection: RolloutCollection, phase: Phase, *, first: int) -> None:
        self.phase = phase
        self._collection = collection
        self._next = first
        self._version = 0
        self._allowed: dict[int, _Iteration] = {}
        self._owners: dict[Key, _Iteration] = {}
        self._asked: SimpleQueue[Callable[[EpisodeLoop], None] | None] = SimpleQueue()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    # ---- the trainer's side -------------------------------------------------------------------

    def allow(self, last: int, *, version: int) -> None:
        """Sample up to this iteration, with weights of this version from now on."""
        self._version = version
        for index in range(self._next, last + 1):
            found = _Iteration(index, self._collection.filling(self.phase))
            self._allowed[index] = found
            self._asked.put(partial(self._order, found))
            self._next = index + 1

    @property
    def allowed(self) -> list[int]:
        """The iterations that are sampled, or were, and have not been taken."""
        return sorted(self._allowed)

    def take(self, iteration: int) -> tuple[Filling, float]:
        """Wait for an iteration's groups and hand them out, once, and the seconds they took.

        Raises: what the thread or `poll` raised; KeyError: the iteration is not among the allowed.
        """
        found = self._allowed[iteration]
        total = found.filling.num_groups * self._collection.hyperparameters.group_size
        is_known = found.filling.max_attempts == 0
        self._wait_for(found.is_there, lambda: found.num_ended, total if is_known else None)
        del self._allowed[iteration]
        return found.filling, found.seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the thread uses neither engine nor scorer.

        Raises: what the thread or `poll` raised.
        """
        if not self._goes_on.is_set():  # in a pause already
            yield
            return
        is_parked, goes_on = threading.Event(), threading.Event()
        self._goes_on = goes_on

        def park(loop: EpisodeLoop) -> None:
            is_parked.set()
            goes_on.wait()

        self._asked.put(park)
        try:
            self._wait_for(is_parked)
            yield
        finally:
            goes_on.set()

    def cancel(self) -> None:
        """End the thread and join it; what it had under way is lost."""
        self._asked.put(None)
        self._goes_on.set()
        self._thread.join()

    def _wait_for(
        self,
        event: threading.Event,
        num_ended: Callable[[], int] = lambda: 0,
        total: int | None = None,
    ) -> None:
        shown = 0
        progress = self._collection.progress
        with progress.stage("rollout_wait", total, "episodes") as advance:
            while not event.wait(_POLL_S):
                if self._error is not None:
                    raise self._error
                if not self._thread.is_alive():
                    raise RuntimeError("the thread that samples rollouts has ended")
                before, shown = shown, num_ended()
                advance(shown - before)

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._collection.loop_ahead(lambda: self._version) as loop:
                while self._do_what_is_asked(loop):
                    for episode in loop.step():
                        self._collect(loop, episode)
        except BaseException as error:  # it is the trainer's to handle
            self._error = error

    def _do_what_is_asked(self, loop: EpisodeLoop) -> bool:
        """Wait for it while there is nothing to play. False at the end."""
        while not loop.num_open or not self._asked.empty():
            do = self._asked.get()
            if do is None:
                return False
            do(loop)
        return True

    def _order(self, found: _Iteration, loop: EpisodeLoop) -> None:
        """Ask for the episodes of an iteration's next attempt."""
        filling = found.filling
        prompts = self._collection.attempt_prompts(found.index, filling.attempts)
        # No other episode of the run has its key, by which its random numbers are drawn, and a run
        # that is resumed has the same.
        number = found.index * max(1, filling.max_attempts) + filling.attempts
        found.rows = ask(
            loop,
            prompts,
            group_size=self._collection.hyperparameters.group_size,
            first=number * len(prompts),
        )
        self._owners |= dict.fromkeys(found.rows, found)

    def _collect(self, loop: EpisodeLoop, episode: Episode) -> None:
        found = self._owners.pop(episode.key)
        found.ended[episode.key] = episode
        found.num_ended += 1
        if len(found.ended) < len(found.rows):
            return
        rollouts = self._collection.player.rollouts([found.ended.pop(key) for key in found.rows])
        found.filling.add(self._collection.groups(rollouts, found.index, found.filling.attempts))
        if not found.filling.is_full:
            self._order(found, loop)
            return
        found.seconds = time.monotonic() - found.began
        found.is_there.set()
