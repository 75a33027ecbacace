"""A Python process of ours that runs a user's code, seen from the process that starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from vapo.system.credentials import without_credentials
from vapo.system.user_functions import python_path

START_TIMEOUT_S = 120.0
MAX_START_FAILURES = 3
SEND_TIMEOUT_S = 2
STOP_TIMEOUT_S = 6.0


class SupervisedProcess:
    """`python -m MODULE CHANNEL CONTROL`, whose first act is `supervision.fork_supervised`.

    It has no variables that hold credentials but those that are passed on, and no accelerator.

    Args:
        output: file descriptor to which it prints; None: what it prints is discarded.
        variables: further environment variables.
        passed: variables with credentials that it gets.
    """

    def __init__(
        self,
        module: str,
        output: int | None = None,
        variables: dict[str, str] | None = None,
        passed: Sequence[str] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        control, self._control = os.pipe()
        self._status: int | None = None
        environment = without_credentials(passed) | {
            "PYTHONPATH": os.pathsep.join(python_path()),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **(variables or {}),
        }
        if output is not None:
            environment["PYTHONUNBUFFERED"] = "1"  # what it printed before it hangs or dies, too
        printed = subprocess.DEVNULL if output is None else output
        descriptors = [theirs.fileno(), control]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        os.close(control)
        limit_sending(ours)
        self.connection = Connection(ours.detach())

    def stop(self) -> int:
        """Kill the process and whatever it started, once; return its exit status."""
        if self._status is not None:
            return self._status
        self.connection.close()
        with suppress(OSError):  # it has ended
            os.write(self._control, b"x")
        os.close(self._control)
        try:
            self._status = self.process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._status = -signal.SIGKILL
        if self._status < 0:  # the supervisor itself was killed, or is stuck
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self._status = self.process.wait()
        return self._status


def limit_sending(channel: socket.socket) -> None:
    """A process that does not read its channel must not stop the trainer."""
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))


def ticketed_reply(line: bytes, ticket: str) -> dict[str, Any] | None:
    """The fields of a reply that is one line of JSON; None where it does not have this ticket."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict) or not ticket or reply.pop("ticket", None) != ticket:
        return None
    return reply
