"""The trainer's side of a host: starts the host, and tells it to open and end processes."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import subprocess
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from vapo.errors import UserError
from vapo.user_code.credentials import variables_without_credentials
from vapo.user_code.process_memory import overwrite_secrets
from vapo.user_code.process_protocol import CLOSE_TIMEOUT_S, MESSAGE, Order, UserCode, read_reply
from vapo.user_code.python_child import environment_of_user_code, python_command
from vapo.user_code.user_functions import python_path

START_TIMEOUT_S = 120.0
MAX_START_FAILURES = 3
SEND_TIMEOUT_S = 2
STOP_TIMEOUT_S = 6.0

_MAX_LINE_BYTES = 2**16
_PING_TIMEOUT_S = 5.0
"""A host that runs answers in milliseconds; it only forks and waits."""


class HostProcess:
    """Starts a host process, sends it orders, and replaces it if something has killed or frozen it.

    The host gets no environment variables with credentials except `code.passed`, and no
    accelerator. The constructor does not wait for it to start; `open` waits until it is ready.

    Args:
        output: the file descriptor to which the host and its processes print; if None, what they
            print is discarded.
    """

    def __init__(self, code: UserCode, output: int | None = None) -> None:
        self._code = code
        self._output = output
        self._status: int | None = None  # of the process, once it has ended
        self._is_ready = False
        self._ticket = ""
        self._channel: socket.socket
        self._control: int
        self.process: subprocess.Popen[bytes]
        self._start()

    def open(self, number: int, channel: socket.socket) -> None:
        """Let the host start process `number`, which gets the socket `channel`.

        A host that has ended is replaced, up to two times.

        Raises: UserError: the user's code cannot be imported, or the process cannot be started.
        """
        self.wait_until_ready()
        message = MESSAGE.pack(Order.OPEN, number)
        for is_last in (False, False, True):
            try:
                self._send(message, channel)
                return
            except OSError as error:
                if is_last:
                    raise UserError(
                        f"the process of the {self._code.what} cannot be started: {error}"
                    ) from error
                self._replace()

    def replace_if_frozen(self) -> None:
        """Ping the host. If it does not answer, kill it with its processes and start another one.

        A host that has ended is not replaced here, because `open` does that.

        Raises: UserError: the new host does not start.
        """
        number = secrets.randbits(64)
        try:
            self._send(MESSAGE.pack(Order.PING, number))
            if self._read_reply(f"{number:x}", _PING_TIMEOUT_S) is None:
                self._replace()
        except OSError:  # it has ended: `open` starts another one
            return

    def end(self, number: int, order: Order) -> None:
        with suppress(OSError):  # it has ended, and all processes with it
            self._send(MESSAGE.pack(order, number))

    def wait_until_ready(self) -> None:
        """Wait until the host has imported the user's code. If the host has ended, start it again.

        Raises: UserError: the code cannot be imported or used, is not imported within
            `START_TIMEOUT_S`, or its import kills the process `MAX_START_FAILURES` times.
        """
        num_failures = 0
        if self._status is not None:
            self._start()
        while not self._is_ready:
            try:
                reply = self._read_reply(self._ticket, START_TIMEOUT_S)
                if reply is None:
                    seconds = f"{START_TIMEOUT_S:.0f} s"
                    raise UserError(f"the {self._code.what} is not imported after {seconds}")
                if "failure" in reply:
                    raise UserError(reply["failure"])
                self._is_ready = True
            except OSError:
                status = self.stop()
                num_failures += 1
                if num_failures == MAX_START_FAILURES:
                    raise UserError(
                        f"the process of the {self._code.what} dies while it starts "
                        f"(exit status {status})"
                    ) from None
                self._start()
            except BaseException:
                self.stop()
                raise

    def close(self, *, waits: bool) -> None:
        """End the host. With `waits` its processes first get `CLOSE_TIMEOUT_S` to close."""
        self._channel.close()
        if waits:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=CLOSE_TIMEOUT_S + 1)
        self.stop()

    def stop(self) -> int:
        """Kill the host and all it has started, unless it has ended; return its exit status."""
        if self._status is not None:
            return self._status
        self._channel.close()
        with suppress(OSError):  # it has ended
            os.write(self._control, b"x")
        os.close(self._control)
        try:
            status = self.process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        if status < 0:  # the supervisor itself was killed, or is stuck
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            status = self.process.wait()
        self._status = status
        return status

    def _replace(self) -> None:
        self.stop()
        self._start()
        self.wait_until_ready()

    def _start(self) -> None:
        """Start `python -m vapo.user_code.host` and send it the user's code to import."""
        overwrite_secrets()  # it is started by a notebook or script, too
        self._channel, host_channel = socket.socketpair()
        control, self._control = os.pipe()
        self._status, self._is_ready = None, False
        variables = variables_without_credentials(self._code.passed)
        environment = environment_of_user_code(variables) | {
            "PYTHONPATH": os.pathsep.join(python_path()),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # a set has one order in all processes
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        }
        if self._code.num_calls > 1:  # else each thread reserves 64 MiB of the limited addresses
            environment["MALLOC_ARENA_MAX"] = "2"
        if self._output is not None:
            environment["PYTHONUNBUFFERED"] = "1"  # what it printed before it hangs or dies, too
        printed = subprocess.DEVNULL if self._output is None else self._output
        descriptors = [host_channel.fileno(), control]
        self.process = subprocess.Popen(
            python_command("vapo.user_code.host", *map(str, descriptors)),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,
        )
        host_channel.close()
        os.close(control)
        limit_sending(self._channel)
        self._ticket = secrets.token_hex(8)
        with suppress(OSError), Connection(self._channel.dup().detach()) as connection:
            connection.send((self._ticket, self._code))

    def _send(self, message: bytes, channel: socket.socket | None = None) -> None:
        socket.send_fds(self._channel, [message], [] if channel is None else [channel.fileno()])

    def _read_reply(self, ticket: str, timeout_s: float) -> dict[str, Any] | None:
        """Return the host's reply with this ticket, which is empty or a `failure`.

        It is None if no such reply comes in time. Replies with other tickets, to earlier questions,
        are ignored.

        Raises: OSError: the host has ended.
        """
        deadline, received = time.monotonic() + timeout_s, b""
        while wait([self._channel], timeout=max(0.0, deadline - time.monotonic())):
            came = self._channel.recv(_MAX_LINE_BYTES)
            if not came:
                raise ConnectionError
            *lines, received = (received + came)[-_MAX_LINE_BYTES:].split(b"\n")
            for line in lines:
                reply = read_reply(line, ticket, lambda fields: None if fields else fields)
                if reply is not None:
                    return reply
        return None


def limit_sending(channel: socket.socket) -> None:
    """Limit the time that sending on a channel may take, so that a process which does not read
    cannot stop the trainer."""
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
