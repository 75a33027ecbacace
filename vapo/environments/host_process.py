"""The trainer's side of its host: starts it, tells it to open and end episodes."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait

from vapo.environments.settings import CLOSE_TIMEOUT_S, MESSAGE, HostSettings, Order
from vapo.errors import UserError
from vapo.system.shown_text import redacted
from vapo.system.supervised_process import (
    MAX_START_FAILURES,
    START_TIMEOUT_S,
    SupervisedProcess,
    ticketed_reply,
)

_MAX_LINE_BYTES = 2**16
_PING_TIMEOUT_S = 5.0
"""A host that runs answers in milliseconds; it only forks and waits."""


class HostProcess:
    """One host, which is started again when something has killed or frozen it.

    Raises:
        UserError: what the settings name cannot be imported or called.
    """

    def __init__(self, settings: HostSettings, output: int | None = None) -> None:
        self._settings = settings
        self._output = output
        self._process = self._started()

    def open(self, episode: int, channel: socket.socket) -> None:
        """Have an episode begin, with its end of the channel.

        Raises:
            UserError: the host has ended and does not start again.
        """
        message = MESSAGE.pack(Order.OPEN, episode)
        try:
            self._send(message, channel)
        except OSError:
            self._replace()
            self._send(message, channel)

    def replace_if_frozen(self) -> None:
        """Ask it for a sign of life; where none comes, start another one, which has no episodes.

        Raises:
            UserError: the new one does not start.
        """
        number = secrets.randbits(64)
        try:
            self._send(MESSAGE.pack(Order.PING, number))
            if not _answers(self._process.connection, f"{number:x}"):
                self._replace()
        except OSError:  # it has ended: `open` starts another one
            return

    def end(self, episode: int, order: Order) -> None:
        with suppress(OSError):  # it has ended, and all episodes with it
            self._send(MESSAGE.pack(order, episode))

    def close(self, *, waits: bool) -> None:
        """End it; `waits` gives the open episodes the time to close that ended ones have."""
        self._process.connection.close()
        if waits:
            with suppress(subprocess.TimeoutExpired):
                self._process.process.wait(timeout=CLOSE_TIMEOUT_S + 1)
        self._process.stop()

    def _replace(self) -> None:
        self._process.stop()
        self._process = self._started()

    def _send(self, message: bytes, channel: socket.socket | None = None) -> None:
        ours = self._process.connection
        with socket.socket(fileno=os.dup(ours.fileno())) as sending:
            socket.send_fds(sending, [message], [] if channel is None else [channel.fileno()])

    def _started(self) -> SupervisedProcess:
        """A host that is ready."""
        for _ in range(MAX_START_FAILURES):
            ticket = secrets.token_hex(8)
            seed = os.environ.get("PYTHONHASHSEED", "0")  # a set has one order in all episodes
            started = SupervisedProcess(
                "vapo.environments.host",
                self._output,
                {"PYTHONHASHSEED": seed},
                passed=self._settings.passed,
            )
            try:
                started.connection.send(replace(self._settings, ticket=ticket))
                failure = _failure(started.connection, ticket)
            except OSError:
                failure = None
            except BaseException:
                started.stop()
                raise
            if failure == "":
                return started
            status = started.stop()
            if failure is not None:
                raise UserError(failure)
        raise UserError(
            f"the process of the environment {self._settings.name} dies while it starts "
            f"(exit status {status})"
        )


def _answers(channel: Connection, ticket: str) -> bool:
    """Whether a reply with this ticket comes in time; others belong to earlier questions."""
    deadline, received = time.monotonic() + _PING_TIMEOUT_S, b""
    while wait([channel], timeout=max(0.0, deadline - time.monotonic())):
        came = os.read(channel.fileno(), _MAX_LINE_BYTES)
        if not came:
            raise ConnectionError
        *lines, received = (received + came)[-_MAX_LINE_BYTES:].split(b"\n")
        if any(ticketed_reply(line, ticket) is not None for line in lines):
            return True
    return False


def _failure(channel: Connection, ticket: str) -> str | None:
    """Why the host cannot be used, empty if it can; None if it has died.

    Raises:
        UserError: it takes too long.
    """
    deadline, received = time.monotonic() + START_TIMEOUT_S, b""
    while b"\n" not in received:
        if not wait([channel], timeout=max(0.0, deadline - time.monotonic())):
            raise UserError(f"the environment is not imported after {START_TIMEOUT_S:.0f} s")
        came = os.read(channel.fileno(), _MAX_LINE_BYTES)
        if not came or len(received) > _MAX_LINE_BYTES:
            return None
        received += came
    try:
        reply = json.loads(received)
    except ValueError:
        return None
    if not isinstance(reply, dict) or reply.get("ticket") != ticket:
        return None
    return redacted(str(reply.get("failure", "")))
