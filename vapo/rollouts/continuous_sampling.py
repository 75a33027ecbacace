"""Samples the rollouts of coming iterations, in a thread that does not wait for the trainer.

    allow(iteration) -> ... -> take(iteration) -> train, new weights -> allow(iteration + 1) -> ...

The thread plays the episodes of one iteration after the other, as far ahead as is allowed. It
begins with the next iteration as soon as there is room, so only training waits for an iteration's
longest episode. An iteration's prompts do not depend on which episodes end first. The engine's
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

from vapo.rollouts.collection import GroupCollector, RolloutCollection
from vapo.rollouts.episodes import Episode, EpisodeLoop, Key
from vapo.rollouts.player import enqueue_episodes
from vapo.types import Phase

THREAD_NAME = "rollouts-ahead"
_POLL_S = 0.2


@dataclass
class _PendingIteration:
    """An iteration that the thread is sampling.

    The trainer reads the groups in `collector` once `is_there` is set. An attempt has an episode
    for each response to the prompts that are sampled at once.
    """

    index: int
    collector: GroupCollector
    rows: list[Key] = field(default_factory=list)  # the episodes of the attempt under way
    ended_episodes: dict[Key, Episode] = field(default_factory=dict)
    num_ended: int = 0  # in all attempts
    start_time: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    is_there: threading.Event = field(default_factory=threading.Event)


class ContinuousSampling:
    """A thread that samples the rollouts of coming iterations, until `cancel`.

    The trainer's calls send commands, which the thread runs between two steps of the engine. An
    error in the thread is raised, as the same object, by the next call that waits for the thread.
    A wait is shown as a stage of the run's progress, which is updated every 0.2 s and may raise to
    end the wait.

    Args:
        phase: the phase that trains on the rollouts.
        first: the first iteration to sample, counted from 0.
    """

    def __init__(self, collection: RolloutCollection, phase: Phase, *, first: int) -> None:
        self.phase = phase
        self._collection = collection
        self._next = first
        self._version = 0
        self._allowed: dict[int, _PendingIteration] = {}
        self._owners: dict[Key, _PendingIteration] = {}
        self._commands: SimpleQueue[Callable[[EpisodeLoop], None] | None] = SimpleQueue()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    # ---- the trainer's side -------------------------------------------------------------------

    def allow(self, last: int, *, version: int) -> None:
        """Let the thread sample all iterations up to `last`.

        `version` is the number of the weights that the engine has now; it is recorded with the
        turns.
        """
        self._version = version
        for index in range(self._next, last + 1):
            pending = _PendingIteration(index, self._collection.group_collector(self.phase))
            self._allowed[index] = pending
            self._commands.put(partial(self._request_attempt, pending))
            self._next = index + 1

    @property
    def allowed(self) -> list[int]:
        """The iterations that the thread may sample and that `take` has not returned, ascending."""
        return sorted(self._allowed)

    def take(self, iteration: int) -> tuple[GroupCollector, float]:
        """Wait for an iteration's groups, and return them with the seconds that sampling took.

        An iteration can be taken once.

        Raises: an error of the thread or of the progress display; KeyError: the iteration is not in
            `allowed`.
        """
        pending = self._allowed[iteration]
        total = pending.collector.num_groups * self._collection.hyperparameters.group_size
        is_known = pending.collector.max_attempts == 0
        self._wait_for(pending.is_there, lambda: pending.num_ended, total if is_known else None)
        del self._allowed[iteration]
        return pending.collector, pending.seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the thread inside the block, so that it uses neither engine nor scorer.

        Raises: an error of the thread or of the progress display.
        """
        if not self._goes_on.is_set():  # the thread is paused already
            yield
            return
        is_parked, goes_on = threading.Event(), threading.Event()
        self._goes_on = goes_on

        def park(loop: EpisodeLoop) -> None:
            is_parked.set()
            goes_on.wait()

        self._commands.put(park)
        try:
            self._wait_for(is_parked)
            yield
        finally:
            goes_on.set()

    def cancel(self) -> None:
        """End the thread and wait until it has ended. Episodes that have not ended are lost."""
        self._commands.put(None)
        self._goes_on.set()
        self._thread.join()

    def _wait_for(
        self,
        event: threading.Event,
        num_ended: Callable[[], int] = lambda: 0,
        total: int | None = None,
    ) -> None:
        num_shown = 0
        progress = self._collection.progress
        with progress.stage("rollout_wait", total, "episodes") as advance:
            while not event.wait(_POLL_S):
                if self._error is not None:
                    raise self._error
                if not self._thread.is_alive():
                    raise RuntimeError("the thread that samples rollouts has ended")
                num_before, num_shown = num_shown, num_ended()
                advance(num_shown - num_before)

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._collection.loop_ahead(lambda: self._version) as loop:
                while self._run_commands(loop):
                    for episode in loop.step():
                        self._collect(loop, episode)
        except BaseException as error:  # the trainer handles it
            self._error = error

    def _run_commands(self, loop: EpisodeLoop) -> bool:
        """Run all waiting commands; while no episode is open, wait for one.

        Returns: whether the thread goes on; False after `cancel`.
        """
        while not loop.num_open or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command(loop)
        return True

    def _request_attempt(self, pending: _PendingIteration, loop: EpisodeLoop) -> None:
        """Give the loop the episodes of an iteration's next attempt: one for each response."""
        collector = pending.collector
        prompts = self._collection.attempt_prompts(pending.index, collector.attempts)
        # An episode's random numbers are drawn by its key. No two episodes of a run have the same
        # key, and a run that is resumed has the same keys.
        number = pending.index * max(1, collector.max_attempts) + collector.attempts
        pending.rows = enqueue_episodes(
            loop,
            prompts,
            group_size=self._collection.hyperparameters.group_size,
            first=number * len(prompts),
        )
        self._owners |= dict.fromkeys(pending.rows, pending)

    def _collect(self, loop: EpisodeLoop, episode: Episode) -> None:
        pending = self._owners.pop(episode.key)
        pending.ended_episodes[episode.key] = episode
        pending.num_ended += 1
        if len(pending.ended_episodes) < len(pending.rows):
            return
        episodes = [pending.ended_episodes.pop(key) for key in pending.rows]
        rollouts = self._collection.player.rollouts(episodes)
        attempt = pending.collector.attempts
        pending.collector.add(self._collection.groups(rollouts, pending.index, attempt))
        if not pending.collector.is_full:
            self._request_attempt(pending, loop)
            return
        pending.seconds = time.monotonic() - pending.start_time
        pending.is_there.set()
