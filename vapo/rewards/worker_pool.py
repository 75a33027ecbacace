"""Verifier processes with a time limit per response: hung and crashed ones are replaced.

Why not `multiprocessing` or a pool library: its children import the caller's `__main__`
(slow with torch, and an error in unguarded scripts), a deadline counts for a whole chunk of
tasks, and what a verifier itself started outlives it. Here a worker is a plain child process
with a supervisor (`vapo.system.supervision`), killed as a whole, and the deadline is that of one
response. Nothing here waits for a worker without a limit: for a reply, for room to send tasks,
for its end.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from vapo.errors import UserError
from vapo.rewards.worker import Settings, Task
from vapo.system.child_process import reward_problem
from vapo.system.shown_text import redacted, visible
from vapo.system.supervised_process import (
    MAX_START_FAILURES,
    START_TIMEOUT_S,
    SupervisedProcess,
    ticketed_reply,
)

MAX_CHUNK = 16
MAX_REPLY_BYTES = 2**16
GARBLED = "garbled: something other than the worker wrote into its channel"


class Worker(SupervisedProcess):
    """One child process and the tasks that it has been given."""

    def __init__(self, settings: Settings, output: int | None = None) -> None:
        super().__init__("vapo.rewards.worker", output, passed=settings.passed)
        self.ready = False
        self.pending: deque[int] = deque()
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self._received = b""
        self._tickets = deque([secrets.token_hex(8)])
        self.connection.send(replace(settings, ticket=self._tickets[0]))

    def send(self, tasks: Sequence[Task]) -> None:
        """Raises: OSError when it is gone, or does not take them within `SEND_TIMEOUT_S`."""
        # Without a request: the end of the channel, or someone else's output. A child of a process
        # that was killed holds the channel open a moment longer.
        if self.has_sent() or self.process.poll() is not None:
            raise ConnectionError
        tickets = [secrets.token_hex(8) for _ in tasks]
        self._tickets.extend(tickets)
        self.connection.send(list(zip(tickets, tasks, strict=True)))

    def has_sent(self) -> bool:
        """Whether there is something to receive."""
        return bool(self._received) or self.connection.poll()

    def receive(self) -> list[dict[str, Any]]:
        """Replies that have come whole; never waits for the rest of one.

        The last is `{"broken": why}` where no more can come: the process is gone, or what came
        is not the reply to the task that it has.
        """
        try:
            received = os.read(self.connection.fileno(), MAX_REPLY_BYTES)
        except OSError:
            received = b""
        *lines, self._received = (self._received + received).split(b"\n")
        replies: list[dict[str, Any]] = []
        for line in lines:
            ticket = self._tickets.popleft() if self._tickets else ""
            reply = read_reply(line, ticket, is_first=not self.ready and not replies)
            if reply is None:
                return [*replies, {"broken": GARBLED}]
            replies.append(reply)
        if not received:
            replies.append({"broken": "crash"})
        elif len(self._received) > MAX_REPLY_BYTES:
            replies.append({"broken": GARBLED})
        return replies


def read_reply(line: bytes, ticket: str, *, is_first: bool = False) -> dict[str, Any] | None:
    """Parse the reply in one line of the channel; None when it does not have this ticket.

    The first is empty, or has a `failure`: whether the worker is ready.
    """
    reply = ticketed_reply(line, ticket)
    if reply is None:
        return None
    if set(reply) == {"failure"}:
        failure = reply["failure"]
        return {"failure": visible(redacted(failure))} if isinstance(failure, str) else None
    if is_first:
        return None if reply else reply
    if set(reply) == {"classes"}:
        classes = reply["classes"]
        are_indices = isinstance(classes, list) and all(
            type(index) is int and 0 <= index < len(classes) for index in classes
        )
        return reply if are_indices else None
    reward, extracted = reply.get("reward"), reply.get("extracted")
    is_verdict = (
        set(reply) == {"is_correct", "reward", "extracted"}
        and isinstance(reply["is_correct"], bool)
        and (reward is None or _is_reward(reward))
        and (extracted is None or isinstance(extracted, str))
    )
    return reply if is_verdict else None


def _is_reward(reward: Any) -> bool:
    try:
        return isinstance(reward, (int, float)) and reward_problem(float(reward)) is None
    except OverflowError:  # an integer of hundreds of digits
        return False


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
        self._finalizer = weakref.finalize(self, _stop_all, self.workers)
        if wait_until_ready:
            self.wait_until_ready()

    def close(self) -> None:
        self._finalizer()

    def run(self, tasks: Sequence[Task], on_reply: Callable[[int, dict[str, Any]], None]) -> None:
        """Call `on_reply(index, reply)` once for each task, in the order of completion.

        A task that hangs beyond the time limit, whose process dies, or during which anything
        else is written into the worker's channel gets the reply `{"failure": "timeout"}`,
        `"crash"` or `GARBLED`; the others are not affected.
        """
        queue = deque(range(len(tasks)))
        chunk = max(1, min(MAX_CHUNK, len(tasks) // (4 * len(self.workers))))
        num_open = len(tasks)

        def finish(worker: Worker, reply: dict[str, Any]) -> None:
            nonlocal num_open
            num_open -= 1
            on_reply(worker.pending.popleft(), reply)

        def give_up(worker: Worker, failure: str) -> None:
            if worker.pending:
                finish(worker, {"failure": failure})
            queue.extendleft(reversed(worker.pending))
            self._restart(worker)

        def receive(worker: Worker) -> None:
            for reply in worker.receive():
                if "broken" in reply:
                    give_up(worker, reply["broken"])
                elif worker.ready:
                    finish(worker, reply)
                    worker.deadline = time.monotonic() + self.settings.timeout_s
                else:
                    self._mark_ready(worker, reply)

        try:
            while num_open:
                for worker in list(self.workers):
                    if worker.ready and not worker.pending and queue:
                        self._send(worker, tasks, queue, chunk)
                for worker in self._readable():
                    receive(worker)
                for worker in self._overdue():
                    if worker.connection.poll():  # it was in time, but this loop was delayed
                        receive(worker)
                    if worker in self._overdue():
                        give_up(worker, "timeout")
        finally:
            for worker in list(self.workers):  # after an interrupt: no stale replies
                if worker.pending:
                    worker.pending.clear()
                    self._restart(worker)

    def _send(self, worker: Worker, tasks: Sequence[Task], queue: deque[int], chunk: int) -> None:
        worker.pending.extend(queue.popleft() for _ in range(min(chunk, len(queue))))
        worker.deadline = time.monotonic() + self.settings.timeout_s
        try:
            worker.send([tasks[index] for index in worker.pending])
        except OSError:  # it broke while idle: none of these tasks is to blame
            queue.extendleft(reversed(worker.pending))
            worker.pending.clear()
            self._restart(worker)

    def _active(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.pending or not worker.ready]

    def _overdue(self) -> list[Worker]:
        return [worker for worker in self._active() if time.monotonic() > worker.deadline]

    def _readable(self) -> list[Worker]:
        """Workers with something to read, after waiting no longer than the next deadline."""
        active = self._active()
        if not active:
            return []
        remaining = min(worker.deadline for worker in active) - time.monotonic()
        by_connection = {worker.connection: worker for worker in active}
        found = wait(list(by_connection), timeout=max(0.0, remaining) + 0.001)
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
                for worker in self._readable():
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
