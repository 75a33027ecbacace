"""The trainer's side of the processes that run a user's code: starts them, asks them, reads
answers.

A host (`host`) imports the user's module and forks a process for each key. If processes may not
share what the import has opened, each has a host of its own, which imports the module again after
the process was killed. The trainer has a socket to each process and waits on all of them at once,
so that a slow one delays no other. Every wait has a limit: for an answer, for room to send a
question and for the end of a process.

`multiprocessing` and pool libraries are not suited: their children import the caller's `__main__`
(slow with torch, and an error in unguarded scripts), a deadline counts for a whole chunk of
questions, and what the code itself started outlives it.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from vapo.user_code.host_process import HostProcess, limit_sending
from vapo.user_code.process_protocol import Order, UserCode, read_reply

GARBLED = "garbled: something other than the answer came through the process's channel"

MAX_WAITING_BYTES = 2**17
"""The questions sent to a busy process have at most this size, so that they fit into its buffer."""

_READ_BYTES = 2**20
_REST_S = 1.0
"""How long the rest of a reply may take, in seconds, if its beginning came before the deadline."""


class Answer(NamedTuple):
    """The fields of an answer from the process of `key`, or its `failure`.

    `is_last` means that the process has been ended.
    """

    key: Any
    fields: dict[str, Any]
    is_last: bool = False


class _Question(NamedTuple):
    """A question that was sent to a process, its ticket, and its size in bytes."""

    ticket: str
    question: Any
    num_bytes: int


@dataclass(eq=False)
class _Process:
    """A process of a user's code: its socket, its open questions, and what it has sent so far."""

    key: Any
    number: int
    host: HostProcess
    channel: Connection
    max_waiting_bytes: int
    questions: deque[_Question] = field(default_factory=deque)
    """The open questions; the process works on the first."""
    deadline: float = math.inf
    received: bytearray = field(default_factory=bytearray)
    has_begun: bool = False
    has_answered: bool = False
    """Whether it has answered any question. One which never has may not have started at all."""


class UserProcesses:
    """Runs a user's code in processes, each under a key, and sends questions to them.

    Each process answers its questions in their order. Only one thread at a time may use this.

    Args:
        timeout_s: the time limit of one answer, in seconds.
        num_hosts: how many host processes import the code. With 1 all keys share one; with more
            each key has its own, and keys are numbers below this.
        output: the file descriptor to which the processes print; if None, what they print is
            discarded.
        may_close: whether open processes get `CLOSE_TIMEOUT_S` to close when all are ended.
    """

    def __init__(
        self,
        code: UserCode,
        *,
        timeout_s: float,
        output: int | None,
        may_close: bool,
        num_hosts: int = 1,
    ) -> None:
        self._code = code
        self._timeout_s = timeout_s
        self._processes: dict[Any, _Process] = {}
        self._numbers = itertools.count()
        self.hosts = [HostProcess(code, output) for _ in range(num_hosts)]
        self._finalizer = weakref.finalize(
            self, _close_all, self.hosts, self._processes, may_close, os.getpid()
        )

    def __len__(self) -> int:
        return len(self._processes)

    def __contains__(self, key: Any) -> bool:
        return key in self._processes

    def wait_until_ready(self) -> None:
        """Wait until all hosts have imported the code.

        Raises: UserError: the code cannot be imported.
        """
        for host in self.hosts:
            host.wait_until_ready()

    def open(self, key: Any) -> None:
        """Start a process under a key that has none.

        Raises: UserError: the user's code cannot be imported, or the process cannot be started.
        """
        parent_end, child_end = socket.socketpair()
        limit_sending(parent_end)
        parent_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_WAITING_BYTES)
        room = parent_end.getsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF
        )  # the system may give less
        max_waiting_bytes = min(MAX_WAITING_BYTES, room // 3)
        host = self.hosts[0 if len(self.hosts) == 1 else key]
        process = _Process(
            key, next(self._numbers), host, Connection(parent_end.detach()), max_waiting_bytes
        )
        with child_end:
            host.open(process.number, child_end)
        self._processes[key] = process

    def ask(self, key: Any, question: Any) -> bool:
        """Send a question to the process of a key, which may still have others to answer.

        Returns: whether it was sent. If not, it must wait until the process has answered another
            one.

        Raises: OSError: the process has ended, or does not read its channel.
        """
        process = self._processes[key]
        ticket = secrets.token_hex(8)
        message = ForkingPickler.dumps((ticket, question))
        waiting = sum(question_waiting.num_bytes for question_waiting in process.questions) + len(
            message
        )
        is_busy = (
            len(process.questions) >= self._code.num_calls
        )  # else it reads the question at once
        if is_busy and waiting > process.max_waiting_bytes:
            return False
        process.channel.send_bytes(message)
        if not process.questions:
            process.has_begun, process.deadline = False, time.monotonic() + self._timeout_s
        process.questions.append(_Question(ticket, question, len(message)))
        return True

    def num_asked(self, key: Any) -> int:
        """Return the number of questions to the process of a key that have no answer yet."""
        return len(self._processes[key].questions)

    def is_sound(self, key: Any) -> bool:
        """Whether a process without questions has not ended and has sent nothing unasked."""
        process = self._processes[key]
        return not process.received and not process.channel.poll()

    def end(self, key: Any, order: Order = Order.END) -> None:
        """End the process of a key. A key without a process is ignored.

        The host is the process that has imported the user's code and forked this one. If hosts are
        not shared (`UserCode.is_shared`), killing the process also ends its host.

        Args:
            order: what the host does. With `Order.END` the process may take up to
                `CLOSE_TIMEOUT_S` to close. With `Order.KILL` it is killed at once.
        """
        process = self._processes.pop(key, None)
        if process is not None:
            _hang_up(process)
            process.host.end(process.number, order)
            if order is Order.KILL and not self._code.is_shared:
                process.host.stop()  # what it has opened may be in the middle of something

    def poll(self, timeout_s: float) -> list[Answer]:
        """Wait for the first answer of any process, and return all answers that have come by then.

        A process is killed if its answer does not come in time, if it dies, or if something else
        comes through its channel. The answer to its question then has a `failure`. An answer of
        which a part came in time gets one more second.

        Args:
            timeout_s: how long to wait for the first answer. With 0, or if no question is open, the
                call does not wait.
        """
        deadline = time.monotonic() + timeout_s
        answers: list[Answer] = []
        while busy_processes := {p.channel: p for p in self._processes.values() if p.questions}:
            first = min(deadline, *(process.deadline for process in busy_processes.values()))
            wait_s = 0.0 if answers else max(0.0, first - time.monotonic())
            ready = set(wait(list(busy_processes), timeout=wait_s))
            for channel, process in busy_processes.items():
                process_answers = self._received(process) if channel in ready else []
                answers += process_answers or self._overdue(process)
            if answers or time.monotonic() >= deadline:
                break
        return answers

    def close(self) -> None:
        """End all processes and hosts. A second call does nothing."""
        self._finalizer()

    def _received(self, process: _Process) -> list[Answer]:
        """Read from a process's channel; return its answers that are complete.

        If it has ended or sent something else, it is killed and the last answer is a failure.
        """
        try:
            received = os.read(process.channel.fileno(), _READ_BYTES)
        except OSError:
            received = b""
        if not received:
            return [self._failed(process, "crash")]
        process.received += received
        answers: list[Answer] = []
        while process.questions:
            line, end, rest = process.received.partition(b"\n")
            if len(line) > self._code.max_answer_bytes:
                return [*answers, self._failed(process, GARBLED)]
            if not end:
                break
            question = process.questions[0]
            checked = partial(self._code.checked, question.question)
            fields = read_reply(bytes(line), question.ticket, checked)
            if fields is None:
                return [*answers, self._failed(process, GARBLED)]
            process.received = rest
            process.questions.popleft()
            process.has_begun, process.has_answered = False, True
            process.deadline = time.monotonic() + self._timeout_s
            answers.append(Answer(process.key, fields))
        return answers

    def _overdue(self, process: _Process) -> list[Answer]:
        """Return a failure if the process's answer is overdue, else an empty list.

        If an answer has begun to arrive, it gets `_REST_S` more.
        """
        now = time.monotonic()
        if now <= process.deadline:
            return []
        if process.received and not process.has_begun:
            process.has_begun, process.deadline = True, now + _REST_S
            return []
        if not process.has_answered:
            process.host.replace_if_frozen()
        return [self._failed(process, "timeout")]

    def _failed(self, process: _Process, failure: str) -> Answer:
        self.end(process.key, Order.KILL)
        return Answer(process.key, {"failure": failure}, is_last=True)


def _hang_up(process: _Process) -> None:
    """Close a process's connection, also for processes that inherited a copy of its socket, so that
    the process ends."""
    with suppress(OSError), socket.socket(fileno=os.dup(process.channel.fileno())) as channel:
        channel.shutdown(socket.SHUT_RDWR)
    process.channel.close()


def _close_all(
    hosts: Sequence[HostProcess], processes: dict[Any, _Process], may_close: bool, owner: int
) -> None:
    if os.getpid() != owner:  # a process that was forked from it ends
        return
    waits = may_close and bool(processes)
    for process in processes.values():
        _hang_up(process)
    processes.clear()
    for host in hosts:
        host.close(waits=waits)
