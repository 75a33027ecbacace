"""A Python process of ours that runs a user's code, seen from the process that starts it."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from vapo.config.secret_variables import SECRET_VARIABLES
from vapo.system.user_functions import python_path

START_TIMEOUT_S = 120.0
MAX_START_FAILURES = 3
SEND_TIMEOUT_S = 2
STOP_TIMEOUT_S = 6.0


class SupervisedProcess:
    """`python -m MODULE CHANNEL CONTROL`, whose first act is `supervision.fork_supervised`.

    It has none of the variables that hold credentials, and no accelerator.

    Args:
        output: file descriptor to which it prints; None: what it prints is discarded.
        variables: further environment variables.
    """

    def __init__(
        self, module: str, output: int | None = None, variables: dict[str, str] | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        control, self._control = os.pipe()
        self._status: int | None = None
        environment = {k: v for k, v in os.environ.items() if k not in SECRET_VARIABLES} | {
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
