"""Collects what verifier processes print, for commands that show single verdicts."""

from __future__ import annotations

import os
import select
import threading
from contextlib import AbstractContextManager

MAX_BYTES = 16_384
"""Of what is printed between two calls of `take`, this many bytes are kept; the rest is counted."""

_MAX_READS = 64


class VerifierOutput(AbstractContextManager["VerifierOutput"]):
    """Collects what verifier processes print, through a pipe that a thread always reads.

    So a process never waits for a reader. `take_printed` also reads what is left in the pipe, so
    that it returns all that a process printed before its reply came. `descriptor` is the end of the
    pipe to which the processes write: their standard output and standard error.
    """

    def __init__(self) -> None:
        self._read_descriptor, self.descriptor = os.pipe()
        self._stop_reader, self._stop_writer = os.pipe()
        os.set_blocking(self._read_descriptor, False)
        self._lock = threading.Lock()
        self._beginning, self._num_bytes = bytearray(), 0
        self._thread = threading.Thread(target=self._keep_reading, daemon=True)
        self._thread.start()

    def take_printed(self) -> str:
        """Return what was printed since the last call. A text above `MAX_BYTES` is cut, and its end
        says how many bytes are missing."""
        with self._lock:
            for _ in range(_MAX_READS):  # a process of the verifier's may never stop printing
                if not self._read_some():
                    break
            text = self._beginning.decode("utf-8", "replace")
            num_dropped = self._num_bytes - len(self._beginning)
            self._beginning, self._num_bytes = bytearray(), 0
        return f"{text}\n... and {num_dropped} bytes more" if num_dropped else text

    def close(self) -> None:
        """Stop the thread and close the pipe. The processes that write to it must have ended."""
        os.close(self._stop_writer)
        self._thread.join()
        for descriptor in (self._read_descriptor, self.descriptor, self._stop_reader):
            os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_reading(self) -> None:
        while True:
            readable, _, _ = select.select([self._read_descriptor, self._stop_reader], [], [])
            if self._stop_reader in readable:
                return
            with self._lock:
                self._read_some()

    def _read_some(self) -> bool:
        try:
            chunk = os.read(self._read_descriptor, 65_536)
        except BlockingIOError:  # `take` was faster, or there is no more
            return False
        self._num_bytes += len(chunk)
        self._beginning += chunk[: MAX_BYTES - len(self._beginning)]
        return bool(chunk)
