"""The host of the processes that run a user's code: `python -m vapo.system.host CHANNEL CONTROL`.

It imports the user's module once and forks a process for each that is asked for, so that a process
costs milliseconds, and one that hangs, crashes or fills its memory harms no other. The trainer
keeps a socket to each process and never waits for the host (`user_processes`). What a process
started goes with it, and all when the trainer is gone (`process_tree`).
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from vapo.errors import UserError
from vapo.system.process_protocol import (
    CLOSE_TIMEOUT_S,
    MESSAGE,
    Answering,
    Order,
    UserCode,
    channel_of,
    failure_of,
    limit_memory,
    print_error,
    write_reply,
)
from vapo.system.process_tree import SEARCH_EVERY_S, ProcessTree, adopt_orphans, fork_supervised
from vapo.system.shown_text import hide


class Host:
    """The open processes, and those that have a moment left to close."""

    def __init__(
        self, channel: socket.socket, make: Callable[[], Answering], *, shows_errors: bool
    ) -> None:
        self._channel = channel
        self._make = make
        self._shows_errors = shows_errors
        self._closing: dict[int, float] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that it wakes
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._tree = ProcessTree()

    def serve(self) -> None:
        """Start and end processes as the trainer says, until it hangs up; then end them all."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while self._turn(selector):
                pass
            selector.unregister(self._channel)
            for number in self._tree.open():
                self._closing.setdefault(number, time.monotonic() + CLOSE_TIMEOUT_S)
            while self._tree.open():
                self._turn(selector)

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Wait for something and do it; False once the trainer has hung up."""
        ends = list(self._closing.values())
        if self._tree.has_orphans:
            ends.append(time.monotonic() + SEARCH_EVERY_S)
        wait_s = max(0.0, min(ends) - time.monotonic()) if ends else None
        ready = [key.fileobj for key, _ in selector.select(wait_s)]
        if self._woken in ready:
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
        goes_on = self._channel not in ready or self._obey()
        for number, at in list(self._closing.items()):
            if time.monotonic() >= at:
                self._tree.kill(number)
                self._closing[number] = time.monotonic() + SEARCH_EVERY_S
        for number in self._tree.reap():
            self._closing.pop(number, None)
        return goes_on

    def _obey(self) -> bool:
        """Take one order; False at the end of the channel."""
        message, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE.size, 1)
        if len(message) != MESSAGE.size:
            return False
        order, number = MESSAGE.unpack(message)
        if order == Order.OPEN:
            self._open(number, descriptors[0])
        elif order == Order.PING:
            write_reply(self._channel.fileno(), f"{number:x}", {})
        elif number in self._tree.open():
            grace = CLOSE_TIMEOUT_S if order == Order.END else 0.0
            self._closing.setdefault(number, time.monotonic() + grace)
        return True

    def _open(self, number: int, descriptor: int) -> None:
        if not self._tree.fork(number):
            os.close(descriptor)
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            os.close(self._woken)
            os.close(self._wake)
            answer(self._make(), channel_of(descriptor), shows_errors=self._shows_errors)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # never back into the host's loop, nor to its exit handlers
            os._exit(0)


def answer(answering: Answering, channel: Connection, *, shows_errors: bool) -> None:
    """In a process of its own: answer each `(ticket, question)` until the trainer hangs up."""
    limit_memory()
    with suppress(EOFError, OSError):
        while True:
            ticket, question = channel.recv()
            try:
                fields = answering(question)
            except BaseException as error:  # a user's code may raise anything
                if shows_errors:
                    print_error(error)
                fields = {"failure": failure_of(error)}
            write_reply(channel.fileno(), ticket, fields)
    try:
        getattr(answering, "close", bool)()
    except BaseException as error:  # which can change no reward any more
        if shows_errors:
            print_error(error)


def serve(channel: socket.socket, ticket: str, code: UserCode) -> None:
    """Import the code, say whether that went well, and be its host."""
    hide(code.hidden)
    try:
        make = code.imported()
    except UserError as error:
        write_reply(channel.fileno(), ticket, {"failure": str(error)})
        return
    host = Host(channel, make, shows_errors=code.shows_errors)
    gc.collect()
    gc.freeze()  # so that a collection in a forked process does not copy the host's memory
    write_reply(channel.fileno(), ticket, {})
    host.serve()


if __name__ == "__main__":
    given, control = map(int, sys.argv[1:])
    fork_supervised(control, given)
    adopt_orphans()
    connection = channel_of(given)
    with suppress(EOFError, ConnectionError):
        first: tuple[str, UserCode] = connection.recv()
        own = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()  # a forked process closes the one that there is
        serve(own, *first)
