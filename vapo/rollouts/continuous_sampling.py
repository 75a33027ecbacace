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

from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.dynamic_sampling import Filling
from vapo.rollouts.episode import Episode
from vapo.rollouts.episodes import EpisodeLoop
from vapo.types import Phase, Rollout

THREAD_NAME = "rollouts-ahead"
_POLL_S = 0.2


@dataclass
class _Iteration:
    """One iteration's groups, as they fill up."""

    filling: Filling
    attempt: int = 0
    rollouts: list[Rollout | None] = field(default_factory=list)
    num_left: int = 0
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0


class ContinuousSampling:
    """The thread, from the first iteration that is sampled to the end of the run.

    An error in the thread is raised, as the same object, by whoever waits for it next. Who waits
    gives a function `poll`, which is called every 0.2 s at least and may raise, to stop waiting.

    Args:
        phase: the one that trains on what is sampled.
        first: the first iteration that it samples, counted from 0.
    """

    def __init__(self, collection: RolloutCollection, phase: Phase, *, first: int) -> None:
        self.phase = phase
        self._collection = collection
        self._group_size = collection.hyperparameters.group_size
        self._next = first
        self._last = first - 1
        self._version = 0
        self._open: dict[int, _Iteration] = {}
        self._rows: dict[tuple[int, int], tuple[int, int]] = {}  # episode -> iteration, row
        self._done: dict[int, _Iteration] = {}
        self._error: BaseException | None = None
        self._ends = self._is_parked = False
        self._num_pauses = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    # ---- the trainer's side -------------------------------------------------------------------

    def allow(self, last: int, *, version: int) -> None:
        """Sample up to this iteration, with weights of this version from now on."""
        with self._changed:
            self._last, self._version = max(last, self._last), version
            self._changed.notify_all()

    def take(self, iteration: int, poll: Callable[[], None]) -> tuple[Filling, float]:
        """Wait for an iteration's groups and hand them out, once, and the seconds they took.

        Raises: what the thread or `poll` raised; ValueError for an iteration that is not allowed
            or taken.
        """

        def is_there() -> bool:
            if iteration in self._done:
                return True
            self._check()
            if iteration < self._next and iteration not in self._open:
                raise ValueError(f"the rollouts of iteration {iteration} were taken already")
            if iteration > self._last:
                raise ValueError(f"iteration {iteration} may not be sampled yet")
            return False

        self._wait_until(is_there, poll)
        with self._changed:
            found = self._done.pop(iteration)
        return found.filling, found.seconds

    def wait(self, poll: Callable[[], None]) -> None:
        """Wait until everything that is allowed is there.

        Raises: what the thread or `poll` raised.
        """

        def are_there() -> bool:
            self._check()
            return self._next > self._last and not self._open

        self._wait_until(are_there, poll)

    def num_ended(self, iteration: int) -> int:
        """How many of an iteration's episodes have ended, those of its earlier attempts too."""
        with self._changed:
            found = self._done.get(iteration) or self._open.get(iteration)
            if found is None:
                return 0
            whole = len(found.filling.sampled) * self._group_size
            return whole + (len(found.rollouts) - found.num_left if found.num_left else 0)

    @property
    def finished(self) -> list[int]:
        """The iterations whose rollouts are there and were not taken."""
        with self._changed:
            return sorted(self._done)

    @contextmanager
    def paused(self, poll: Callable[[], None]) -> Iterator[None]:
        """While the thread uses neither engine nor scorer.

        Raises: what the thread or `poll` raised.
        """
        with self._changed:
            self._num_pauses += 1
        try:
            self._wait_until(lambda: self._is_parked or not self._thread.is_alive(), poll)
            self._check()
            yield
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._changed.notify_all()

    def cancel(self) -> None:
        """End the thread and join it; what it had under way is lost."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _wait_until(self, holds: Callable[[], bool], poll: Callable[[], None]) -> None:
        """`holds` is called with the lock, `poll` without it: the thread need not wait for it."""
        while True:
            with self._changed:
                if holds():
                    return
                self._changed.wait(_POLL_S)
            poll()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive() or self._ends:
            raise RuntimeError("the thread that samples rollouts has ended")

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._collection.loop_ahead(lambda: self._version) as loop:
                while self._may_go_on(loop):
                    for episode in loop.step():
                        self._collect(loop, episode)
        except BaseException as error:  # it is the trainer's to handle
            self._error = error
        with self._changed:
            self._changed.notify_all()

    def _may_go_on(self, loop: EpisodeLoop) -> bool:
        """Order what is allowed; wait while there is nothing to do, or somebody asks for a pause.

        False at the end.
        """
        with self._changed:
            while not self._ends:
                if not self._num_pauses:
                    while self._next <= self._last:
                        self._order(loop, self._next)
                        self._next += 1
                    if loop.num_open:
                        self._is_parked = False
                        return True
                self._is_parked = True  # as long as it waits here it uses nothing
                self._changed.notify_all()
                self._changed.wait()
            return False

    def _order(self, loop: EpisodeLoop, iteration: int) -> None:
        """Ask for the episodes of an iteration's next attempt."""
        found = self._open.setdefault(iteration, _Iteration(self._collection.filling(self.phase)))
        prompts = self._collection.attempt_prompts(iteration, found.attempt)
        size = self._group_size
        found.rollouts = [None] * (len(prompts) * size)
        found.num_left = len(found.rollouts)
        # No other episode of the run has its key, by which its random numbers are drawn, and a run
        # that is resumed has the same.
        number = iteration * max(1, found.filling.max_attempts) + found.attempt
        for i, prompt in enumerate(prompts):
            for j in range(size):
                key = (number * len(prompts) + i, j)
                self._rows[key] = (iteration, i * size + j)
                loop.add(prompt, key)

    def _collect(self, loop: EpisodeLoop, episode: Episode) -> None:
        iteration, row = self._rows.pop(episode.key)
        found = self._open[iteration]
        found.rollouts[row] = episode.rollout(self._collection.player.tokenizer)
        found.num_left -= 1
        if found.num_left:
            return
        whole = [rollout for rollout in found.rollouts if rollout is not None]
        self._collection.player.scorer.check(whole)
        found.filling.add(self._collection.groups(whole, iteration, found.attempt))
        found.attempt += 1
        with self._changed:
            if found.filling.is_full:
                found.seconds = time.monotonic() - found.began
                self._done[iteration] = self._open.pop(iteration)
                self._changed.notify_all()
            else:
                self._order(loop, iteration)
