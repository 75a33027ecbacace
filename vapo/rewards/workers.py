"""Verifier processes with a time limit per response: hung and crashed ones are replaced.

Why not `multiprocessing` or a pool library: its children import the caller's `__main__`
(slow with torch, and an error in unguarded scripts), a deadline counts for a whole chunk of
tasks, and what a verifier itself started outlives it. Here a worker is a plain child process
in its own process group, killed as a whole, and the deadline is that of one response.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from vapo.errors import UserError
from vapo.rewards.worker import Settings, Task
from vapo.tracking.credentials import VARIABLES

START_TIMEOUT_S = 120.0
MAX_START_FAILURES = 3
MAX_CHUNK = 16


class Worker:
    """One child process and the tasks that it has been given."""

    def __init__(self, settings: Settings) -> None:
        ours, theirs = socket.socketpair()
        paths = [path or os.getcwd() for path in sys.path]
        environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | {
            "PYTHONPATH": os.pathsep.join([*paths, os.getcwd()]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vapo.rewards.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.ready = False
        self.pending: deque[int] = deque()
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.connection.send(settings)

    def receive(self) -> dict[str, Any] | None:
        """The next reply; None when the process is gone."""
        try:
            reply: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return None
        return reply

    def stop(self) -> None:
        """Kills the process and everything in its group."""
        self.connection.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.process.wait()


class WorkerPool:
    """`num_workers` verifier processes; used by one thread at a time.

    Raises:
        UserError: with `wait_until_ready`, if the verifier cannot be built.
    """

    def __init__(
        self, settings: Settings, *, num_workers: int, wait_until_ready: bool = False
    ) -> None:
        self.settings = settings
        self.num_start_failures = 0
        self.workers = [Worker(settings) for _ in range(num_workers)]
        self._finalizer = weakref.finalize(self, _stop_all, self.workers)
        if wait_until_ready:
            self._await_first()

    def close(self) -> None:
        self._finalizer()

    def run(self, tasks: Sequence[Task], on_reply: Callable[[int, dict[str, Any]], None]) -> None:
        """Calls `on_reply(index, reply)` once for each task, in the order of completion.

        A task that hangs beyond the time limit, or whose process dies, gets the reply
        `{"failure": "timeout"}` or `{"failure": "crash"}`; the others are not affected.
        """
        queue = deque(range(len(tasks)))
        chunk = max(1, min(MAX_CHUNK, len(tasks) // (4 * len(self.workers))))
        num_open = len(tasks)

        def finish(worker: Worker, reply: dict[str, Any]) -> None:
            nonlocal num_open
            num_open -= 1
            on_reply(worker.pending.popleft(), reply)

        def replace(worker: Worker, failure: str) -> None:
            if worker.pending:
                finish(worker, {"failure": failure})
            queue.extendleft(reversed(worker.pending))
            self._restart(worker)

        try:
            while num_open:
                for worker in list(self.workers):
                    if worker.ready and not worker.pending and queue:
                        self._send(worker, tasks, queue, chunk)
                for worker in self._readable():
                    reply = worker.receive()
                    if reply is None:
                        replace(worker, "crash")
                    elif worker.ready:
                        finish(worker, reply)
                        worker.deadline = time.monotonic() + self.settings.timeout_s
                    else:
                        self._mark_ready(worker, reply)
                for worker in list(self.workers):
                    busy = not worker.ready or worker.pending
                    if busy and time.monotonic() > worker.deadline and not worker.connection.poll():
                        replace(worker, "timeout")
        finally:
            for worker in list(self.workers):  # after an interrupt: no stale replies
                if worker.pending:
                    worker.pending.clear()
                    self._restart(worker)

    def _send(self, worker: Worker, tasks: Sequence[Task], queue: deque[int], chunk: int) -> None:
        worker.pending.extend(queue.popleft() for _ in range(min(chunk, len(queue))))
        worker.deadline = time.monotonic() + self.settings.timeout_s
        try:
            worker.connection.send([tasks[index] for index in worker.pending])
        except OSError:  # it died while idle: none of these tasks is to blame
            queue.extendleft(reversed(worker.pending))
            worker.pending.clear()
            self._restart(worker)

    def _readable(self) -> list[Worker]:
        """Workers with something to read, after waiting no longer than the next deadline."""
        active = [worker for worker in self.workers if worker.pending or not worker.ready]
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
        if not worker.ready:
            self.num_start_failures += 1
            if self.num_start_failures >= MAX_START_FAILURES:
                raise UserError(
                    f"the verifier's processes die while they start (verifier "
                    f"{self.settings.kind!r}, exit status {worker.process.poll()})"
                )
        worker.stop()
        self.workers[self.workers.index(worker)] = Worker(self.settings)

    def _await_first(self) -> None:
        try:
            while not any(worker.ready for worker in self.workers):
                for worker in self._readable():
                    reply = worker.receive()
                    if reply is None:
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
