"""Verifier processes with a time limit per response: hung and crashed ones are replaced.

Why not `multiprocessing` or a pool library: its children import the caller's `__main__`
(slow with torch, and an error in unguarded scripts), a deadline counts for a whole chunk of
tasks, and what a verifier itself started outlives it. Here a worker is a plain child process
with a supervisor (`vapo.system.supervision`), killed as a whole, and the deadline is that of one
response. Nothing here waits for a worker without a limit: for a reply, for room to send tasks,
for its end.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from vapo.errors import UserError
from vapo.rewards.worker import Settings, Task
from vapo.rewards.worker_process import Worker
from vapo.system.supervised_process import MAX_START_FAILURES, START_TIMEOUT_S

MAX_CHUNK = 16

WAIT_S = 0.5
"""For a reply, before whoever waits looks around again."""

OnReply = Callable[[dict[str, Any]], None]


class _Asked(NamedTuple):
    task: Task
    on_reply: OnReply


class WorkerPool:
    """`num_workers` verifier processes; used by one thread at a time.

    Args:
        output: file descriptor to which they print; None: what they print is discarded.

    Raises:
        UserError: with `wait_until_ready`, if the verifier cannot be built.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        num_workers: int,
        wait_until_ready: bool = False,
        output: int | None = None,
    ) -> None:
        self.settings = settings
        self._output = output
        self.num_start_failures = 0
        self.workers = [Worker(settings, output) for _ in range(num_workers)]
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}  # queued, or given to a process
        self._queue: OrderedDict[int, None] = OrderedDict()  # the numbers of those queued
        self._finalizer = weakref.finalize(self, _stop_all, self.workers)
        if wait_until_ready:
            self.wait_until_ready()

    def close(self) -> None:
        self._finalizer()

    def submit(self, task: Task, on_reply: OnReply) -> int:
        """Queue a task. `pump` calls `on_reply(reply)` once, when its reply is there.

        A task that hangs beyond the time limit, whose process dies, or during which anything
        else is written into the worker's channel gets the reply `{"failure": "timeout"}`,
        `"crash"` or `GARBLED`; the others are not affected.

        Returns: its number.
        """
        number = next(self._numbers)
        self._asked[number] = _Asked(task, on_reply)
        self._queue[number] = None
        return number

    def forget(self, numbers: Collection[int]) -> None:
        """Nobody waits for the replies of these tasks any more."""
        for number in numbers:
            self._asked.pop(number, None)
            self._queue.pop(number, None)

    def pump(self, timeout_s: float) -> None:
        """Give tasks to processes that have none, and hand out the replies that have come.

        Waits at most so long for the first, 0: not at all; at once if nothing is queued or asked.

        Raises: UserError: the processes die while they start, or the verifier cannot be built.
        """
        try:
            self._send()
            for worker in self._readable(timeout_s):
                self._receive(worker)
            for worker in self._overdue():
                if worker.connection.poll():  # it was in time, but its reply was not taken
                    self._receive(worker)
                if worker in self._overdue():
                    self._give_up(worker, "timeout")
            self._send()
        except BaseException:  # an interrupt may come between a reply and its task
            for worker in list(self.workers):
                if worker.pending:
                    self._take_back(worker)
            raise

    def run(self, tasks: Sequence[Task], on_reply: Callable[[int, dict[str, Any]], None]) -> None:
        """Call `on_reply(index, reply)` once for each task, in the order of completion."""
        num_left = len(tasks)

        def finish(index: int, reply: dict[str, Any]) -> None:
            nonlocal num_left
            num_left -= 1
            on_reply(index, reply)

        numbers = [self.submit(task, partial(finish, index)) for index, task in enumerate(tasks)]
        try:
            while num_left:
                self.pump(WAIT_S)
        finally:
            self.forget(numbers)

    def _receive(self, worker: Worker) -> None:
        for reply in worker.receive():
            if "broken" in reply:
                self._give_up(worker, reply["broken"])
            elif worker.ready:
                self._finish(worker, reply)
                worker.deadline = time.monotonic() + self.settings.timeout_s
            else:
                self._mark_ready(worker, reply)

    def _finish(self, worker: Worker, reply: dict[str, Any]) -> None:
        asked = self._asked.pop(worker.pending.popleft(), None)
        if asked is not None:
            asked.on_reply(reply)

    def _give_up(self, worker: Worker, failure: str) -> None:
        """Its first task has failed; the others are another's."""
        if worker.pending:
            self._finish(worker, {"failure": failure})
        self._take_back(worker)

    def _take_back(self, worker: Worker) -> None:
        for number in reversed(worker.pending):
            if number in self._asked:
                self._queue[number] = None
                self._queue.move_to_end(number, last=False)
        worker.pending.clear()
        self._restart(worker)

    def _send(self) -> None:
        """Give each free process some of the queue: few of a short one, so that all have work."""
        for worker in list(self.workers):
            if not worker.ready or worker.pending or not self._queue:
                continue
            chunk = max(1, min(MAX_CHUNK, len(self._queue) // (4 * len(self.workers))))
            worker.pending.extend(self._queue.popitem(last=False)[0] for _ in range(chunk))
            worker.deadline = time.monotonic() + self.settings.timeout_s
            try:
                worker.send([self._asked[number].task for number in worker.pending])
            except OSError:  # it broke while idle: none of these tasks is to blame
                self._take_back(worker)

    def _active(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.pending or not worker.ready]

    def _overdue(self) -> list[Worker]:
        return [worker for worker in self._active() if time.monotonic() > worker.deadline]

    def _readable(self, timeout_s: float) -> list[Worker]:
        """Workers with something to read, after waiting no longer than the next deadline."""
        active = self._active()
        if not active:
            return []
        remaining = max(0.0, min(worker.deadline for worker in active) - time.monotonic()) + 0.001
        by_connection = {worker.connection: worker for worker in active}
        found = wait(list(by_connection), timeout=min(remaining, timeout_s))
        return [worker for connection, worker in by_connection.items() if connection in found]

    def _mark_ready(self, worker: Worker, reply: dict[str, Any]) -> None:
        if "failure" in reply:
            raise UserError(reply["failure"])
        worker.ready = True
        self.num_start_failures = 0

    def _restart(self, worker: Worker) -> None:
        status = worker.stop()
        if not worker.ready:
            self.num_start_failures += 1
            if self.num_start_failures >= MAX_START_FAILURES:
                raise UserError(
                    f"the verifier's processes die while they start (verifier "
                    f"{self.settings.kind!r}, exit status {status})"
                )
        self.workers[self.workers.index(worker)] = Worker(self.settings, self._output)

    def wait_until_ready(self) -> None:
        """Until one process has its verifier. Raises: UserError: it cannot be made."""
        try:
            while not any(worker.ready for worker in self.workers):
                for worker in self._readable(WAIT_S):
                    for reply in worker.receive():
                        if "broken" in reply:
                            self._restart(worker)
                        else:
                            self._mark_ready(worker, reply)
                if time.monotonic() > min(worker.deadline for worker in self.workers):
                    raise UserError(
                        f"verifier {self.settings.kind!r} ({self.settings.function}) is not "
                        f"imported after {START_TIMEOUT_S:.0f} s"
                    )
        except UserError:
            self.close()
            raise


def _stop_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()
