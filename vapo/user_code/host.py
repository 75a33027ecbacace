"""The host process, which forks the processes that run a user's code.

It is started as `python -m vapo.user_code.host CHANNEL CONTROL`.

It imports the user's module once and forks each process from there. So a process costs
milliseconds, and one that hangs, crashes or fills its memory harms no other. The trainer keeps a
socket to each process and never waits for the host (`user_processes`). Everything that a process
started ends with it, and everything ends when the trainer is gone (`supervision`).
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from vapo.errors import UserError
from vapo.errors.redactor import hide
from vapo.user_code.concurrent_answers import answer_concurrently
from vapo.user_code.process_protocol import (
    CLOSE_TIMEOUT_S,
    MEMORY_HEADROOM_BYTES,
    MESSAGE,
    THREAD_BYTES,
    Answering,
    Order,
    UserCode,
    channel_of,
    failure_of,
    limit_memory,
    print_error,
    write_reply,
)
from vapo.user_code.supervision import (
    adopt_orphans,
    die_with_parent,
    fork_supervised,
    kill_with_group,
)

SEARCH_EVERY_S = 0.2
"""The search for what ended processes left behind is made at most this often, in seconds."""


class Host:
    """Starts and ends processes with a user's code, as the trainer orders by messages.

    A process is ended with everything that it has started. Each process leads a process group, so
    that one signal reaches all of it that has not left the group. On Linux, orphans of what it
    started become its own children, or the host's once it has ended. So a child of the host that is
    not an open process is left over from an ended one, and is killed.
    """

    def __init__(
        self, channel: socket.socket, code: UserCode, make: Callable[[], Answering]
    ) -> None:
        self._channel, self._code, self._make = channel, code, make
        self._host = os.getpid()
        self._pids: dict[int, int] = {}
        self._kill_times: dict[int, float] = {}  # when to kill a process that was told to end
        self._import_pids = self._children()  # started by the import of the user's module
        self._next_search = 0.0
        self._has_orphans = False  # something that an ended process left behind may still run
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that it wakes
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Carry out the trainer's orders until it closes the channel; then end all processes."""
        while self._handle_next(self._channel, self._wake_reader):
            pass
        for number in self._pids:
            self._kill_times.setdefault(number, time.monotonic() + CLOSE_TIMEOUT_S)
        while self._pids:
            self._handle_next(self._wake_reader)

    def _handle_next(self, *watched: Any) -> bool:
        """Wait for an order, the end of a process or a kill time, and handle it.

        Returns: False once the trainer has closed the channel.
        """
        ends = list(self._kill_times.values())
        if self._has_orphans:
            ends.append(time.monotonic() + SEARCH_EVERY_S)
        ready = wait(watched, max(0.0, min(ends) - time.monotonic()) if ends else None)
        if self._wake_reader in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_reader, 4096)
        is_open = self._channel not in ready or self._handle_order()
        for number, kill_time in list(self._kill_times.items()):
            if time.monotonic() >= kill_time:
                _kill_with_own_group(self._pids[number])
                self._kill_times[number] = time.monotonic() + SEARCH_EVERY_S
        self._reap()
        return is_open

    def _handle_order(self) -> bool:
        """Read one order of the trainer from the channel and carry it out.

        An order starts a process, ends or kills one, or asks whether the host still answers. A
        process that was told to end keeps its kill time, even if it is then ordered to be killed.
        An order on a process that has ended does nothing.

        Returns: False if the channel is closed.
        """
        message, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE.size, 1)
        if len(message) != MESSAGE.size:
            return False
        order, number = MESSAGE.unpack(message)
        if order == Order.OPEN:
            self._open(number, descriptors[0])
        elif order == Order.PING:
            write_reply(self._channel.fileno(), f"{number:x}", {})
        elif number in self._pids:
            grace = CLOSE_TIMEOUT_S if order == Order.END else 0.0
            self._kill_times.setdefault(number, time.monotonic() + grace)
        return True

    def _open(self, number: int, descriptor: int) -> None:
        pid = os.fork()
        with suppress(OSError):  # parent and child both do it, as either may run first
            os.setpgid(pid, pid)
        if pid:
            self._pids[number] = pid
            os.close(descriptor)
            return
        try:
            die_with_parent(self._host)
            adopt_orphans()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            answer(self._make(), channel_of(descriptor), self._code)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # never back into the host's loop, nor to its exit handlers
            os._exit(0)

    def _reap(self) -> None:
        """Forget the processes that have ended, and kill everything they started."""
        numbers = {pid: number for number, pid in self._pids.items()}
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if (number := numbers.get(pid)) is None:
                    continue
                _kill_group(pid)  # until now its number has not been given to another process
                del self._pids[number]
                self._kill_times.pop(number, None)
                self._has_orphans = True
        if self._has_orphans and time.monotonic() >= self._next_search:
            start = time.monotonic()
            orphans = self._children() - self._import_pids - set(self._pids.values())
            for pid in orphans:
                kill_with_group(pid)
            self._has_orphans = bool(orphans)
            now = time.monotonic()  # where there are many processes a search takes long
            self._next_search = now + max(SEARCH_EVERY_S, 10 * (now - start))

    def _children(self) -> set[int]:
        return {process.pid for process in psutil.Process(self._host).children()}


def _kill_with_own_group(pid: int) -> None:
    """Kill a process and, if it leads a process group, that group.

    If the user's code has moved it to another group, that group is not killed, since another
    process may lead it.
    """
    _kill_group(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def answer(answering: Answering, channel: Connection, code: UserCode) -> None:
    """Answer each `(ticket, question)` of a channel by a user's code, until the trainer closes it.

    A forked process of the host does nothing else. Its memory is limited. What the code raises
    becomes the answer `failure`. At the end the code's `close()` is called, if it has one.
    """
    # besides the threads that answer there may be as many whose time is over
    stacks = 2 * code.num_calls * THREAD_BYTES if code.num_calls > 1 else 0
    limit_memory(MEMORY_HEADROOM_BYTES + stacks)

    def reply(question: Any) -> dict[str, Any]:
        try:
            return answering(question)
        except BaseException as error:  # a user's code may raise anything
            if code.shows_errors:
                print_error(error)
            return {"failure": failure_of(error)}

    write = partial(write_reply, channel.fileno())
    if code.num_calls > 1:
        answer_concurrently(reply, channel, write, timeout_s=code.call_timeout_s)
    else:
        with suppress(EOFError, OSError):
            while True:
                ticket, question = channel.recv()
                write(ticket, reply(question))
    try:
        getattr(answering, "close", bool)()
    except BaseException as error:  # it cannot change any reward now
        if code.shows_errors:
            print_error(error)


def serve(channel: socket.socket, ticket: str, code: UserCode) -> None:
    """Import a user's code and tell the trainer whether that succeeded; if so, run the host.

    The reply to the trainer has the `ticket`.
    """
    hide(code.hidden)
    try:
        make = code.imported()
    except UserError as error:
        write_reply(channel.fileno(), ticket, {"failure": str(error)})
        return
    host = Host(channel, code, make)
    gc.collect()
    gc.freeze()  # so that a collection in a forked process does not copy the host's memory
    write_reply(channel.fileno(), ticket, {})
    host.serve()


if __name__ == "__main__":
    channel_descriptor, control = map(int, sys.argv[1:])
    fork_supervised(control, channel_descriptor)
    adopt_orphans()
    connection = channel_of(channel_descriptor)
    with suppress(EOFError, ConnectionError):
        first: tuple[str, UserCode] = connection.recv()
        trainer_channel = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()  # a forked process closes the one that there is
        serve(trainer_channel, *first)
